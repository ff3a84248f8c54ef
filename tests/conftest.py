"""What every test shares."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest
from hypothesis import settings

# Cores are shared and kernels compile on first use: a slow example is no failure. The test's own limit holds.
# Not the same examples in each run of CI: the profile it would choose by itself is that of ``derandomize``.
settings.register_profile("moonpool", deadline=None, derandomize=False)
settings.load_profile("moonpool")

# Processes of tests that are forked too, and what they import.
_EARLY = {
    "tests.transfer.peer_process": ["moonpool.transfer", "uvloop"],
    "tests.runtime.fork_target": [],
    "tests.runtime.replica_node": ["moonpool.runtime.replicas.group", "moonpool.runtime.service.lifecycle"],
    "moonpool": ["moonpool.cli", "moonpool.objects.command", "moonpool.commands.index"],
}
_LATE: dict[str, list[str]] = {
    "tests.engine.ranks.link_rank": [],
    "tests.kvstore.ssd_worker": [],
    "tests.kvstore.store_worker": [],
    "tests.runtime.loaded_names": [],
    "tests.objects.in_namespace": [],
    "tests.store_node.putter": [],
    "tests.connectors.small_engine": ["moonpool.connectors.vllm.worker"],
}

pytest_plugins = ["tests.shared_cluster", "tests.ci_skips"]
if find_spec("grpc") is not None:
    pytest_plugins.append("tests.grpc_servers")
if find_spec("pytest_asyncio") is None:
    pytest_plugins.append("tests.plain_asyncio")
if find_spec("xdist") is not None:
    pytest_plugins.append("tests.shared_out")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        gc.disable()  # until all is imported
    # Started by the first test that starts a process of ours: those that follow need not import torch.
    if find_spec("aiohttp") is not None:
        from moonpool.local.preload import COMPUTE_PRELOAD, PRELOAD
        from moonpool.runtime.service.fork_server import use_fork_servers

        imports = [*COMPUTE_PRELOAD["moonpool.node"], "tests.engine.short_profile"]
        others = ("tests.cluster.held_node", "tests.cluster.hasty_node")
        nodes = dict.fromkeys(("moonpool.node", *others), imports)
        use_fork_servers(_EARLY | PRELOAD | COMPUTE_PRELOAD | nodes | _LATE)

        from moonpool.runtime.security.local_key import local_key

        # Made by the first cluster of a user: processes of tests before and after it must agree.
        local_key()


def pytest_collection_finish() -> None:
    if "moonpool.engine.execution.cost_profile" in sys.modules:
        import_module("tests.engine.short_profile")
    # Tests collect garbage to see that nothing leaks: not through all that was imported.
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_identity() -> Iterator[None]:
    """A test that gives this process an identity, perhaps by a command, gives it to no other test."""
    from moonpool.runtime.security import process

    before = process._current
    yield
    process._current = before


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (marker := item.get_closest_marker("gpu")) is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: `make gpu`, on a machine that has one")
        if marker.args and torch.cuda.device_count() < marker.args[0]:
            pytest.skip(f"needs {marker.args[0]} NVIDIA GPUs: `make gpu`, on a machine that has them")
