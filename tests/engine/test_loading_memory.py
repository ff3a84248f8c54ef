"""While weights are loaded there is little more in memory than the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.tensor_slices import expected_tensors

ROOT = Path(__file__).parents[2]

# Prints what loading one rank's part took: the most there was beside what had been there, and the part.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.model.transformer import Model
from moonpool.engine.sharding.parallel_plan import ParallelPlan
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.engine.checkpoint.weights import Checkpoint

def resident(word):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(word))

torch.set_num_threads(1)
torch.ones(8, 8) @ torch.ones(8, 8)
config = ModelConfig.from_checkpoint(Path(sys.argv[1]))
tp = int(sys.argv[2])
shard = ParallelPlan(tp).shard(config, tp - 1)
sizes = []
slices = TensorSlices(config, shard)
checkpoint = Checkpoint(config.path, lambda done, total, name: sizes.append(done), slices)
before = resident("VmRSS")
model = Model(
    config, checkpoint, dtype=torch.float32, device=torch.device("cpu"), max_len=64, shard=shard, link=None
)
largest = max(b - a for a, b in zip([0, *sizes], sizes))
print(json.dumps({"most": resident("VmHWM") - before, "part": sizes[-1], "largest": largest}))
"""


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_ranks_part_and_one_tensor_is_what_loading_takes(
    make_checkpoint: Any, tmp_path: Path, tp: int
) -> None:
    config_file = make_checkpoint("llama").path / "config.json"
    words = json.loads(config_file.read_text()) | {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(words))
    config = ModelConfig.from_checkpoint(tmp_path)
    shapes = expected_tensors(config)
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(tp)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["part"] > 100e6 / tp
    # In bfloat16, as it is stored, though it computes in float32; and 16 MB for what comes to be on the way.
    assert found["most"] < 1.25 * found["part"] + found["largest"] + 16e6, found
