"""What the fork server imports: all that its processes need, and nothing that keeps it from forking."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from moonpool.runtime.service.fork_server import SERVER_ENVIRONMENT

IMPORT_ALL = """
import importlib, json, os, sys
from moonpool.local.preload import COMPUTE_PRELOAD, PRELOAD
import torch
asked = []
for name in ("device_count", "init", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, lambda *words, name=name: asked.append(name))
for modules in [*PRELOAD.values(), *COMPUTE_PRELOAD.values()]:
    for module in modules:
        importlib.import_module(module)
tasks = os.listdir("/proc/self/task")
before = set(sys.modules)
for module in [*PRELOAD, *COMPUTE_PRELOAD]:
    importlib.import_module(module if module.endswith(("worker", "daemon")) else f"{module}.__main__")
late = {name for name in sys.modules if not name.endswith((".__main__", ".worker", ".daemon"))} - before
found = {"tasks": len(tasks), "cuda": asked, "transformers": "transformers" in before, "late": sorted(late)}
print(json.dumps(found))
"""


def test_all_is_imported_and_forking_stays_safe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **SERVER_ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["tasks"] == 1, "a process with threads must not fork"
    # With PYTORCH_NVML_BASED_CUDA_CHECK torch may be asked whether there is a GPU.
    assert found["cuda"] == [], "a context of CUDA does not survive a fork"
    assert not found["transformers"]
    assert found["late"] == [], "to be added to PRELOAD"
