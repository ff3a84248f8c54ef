"""Loading is seen: a bar on a terminal, log lines elsewhere, and messages to a parent that asked."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.service.child import REPORTS_LOADING
from moonpool.runtime.service.load_progress import LoadProgress

ROOT = Path(__file__).parents[2]

# What a node does until it has its memory, without what it needs of others.
PROGRAM = """
import sys
from contextlib import closing
from moonpool.engine.execution import cost_profile
from moonpool.runtime.service.load_progress import LoadProgress
from moonpool.engine.node.engine_memory import EngineMemory
from moonpool.runtime.service.lifecycle import run_service
from moonpool.transfer import TransferAgent

cost_profile._BUDGET_S = 0.02

async def main(config, context):
    async with await TransferAgent.start(config.transfer, agent_id="node", epoch=1) as agent:
        with closing(LoadProgress("node", context.loaded)) as progress:
            memory = await EngineMemory.open(config, agent, progress)
        context.ready()
        await memory.engine.close()
        await memory.blocks.close()

sys.exit(run_service(main, role="test-node"))
"""


def start(path: Path, stderr: int, *sets: str, **environment: str) -> subprocess.Popen[bytes]:
    options = [f"model.path={path}", "engine.block_size=8", f"engine.pool_nbytes={1 << 20}", *sets]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *(word for option in options for word in ("--set", option))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | environment,
    )


def read_terminal(fd: int) -> str:
    """Until the last process has closed it."""
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    except OSError:
        pass  # what Linux says at the end of a terminal
    os.close(fd)
    return b"".join(parts).decode()


@pytest.mark.slow
def test_ranks_load_behind_one_bar_on_a_terminal(make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen3", num_attention_heads=8, num_key_value_heads=2).path
    ours, theirs = pty.openpty()
    with start(path, theirs, "engine.parallel.tp=2", TERM="xterm-256color", COLUMNS="120") as process:
        os.close(theirs)
        seen = read_terminal(ours)
        assert process.stdout is not None
        # Who did not ask is told nothing before the ready line.
        (line,) = process.stdout.read().splitlines()
    assert process.returncode == 0, seen
    assert json.loads(line)["ready"]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert re.search(r"node: weights ━+ +100% +[\d.]+/[\d.]+ [kM]?B", plain), seen
    # What is logged while the bar is there has lines of its own.
    assert re.search(
        r"[\r\n]\d\d:\d\d:\d\d\.\d{3} INFO +test-node .* 2 ranks .* ready after [\d.]+ s\r?\n", plain
    )
    assert "\x1b[?25h" in seen, "the cursor stays hidden"
    # Nothing of the bar is left: the line it was on is erased behind it.
    assert seen.rindex("\x1b[2K") > seen.rindex("━")


@pytest.mark.slow
def test_elsewhere_it_is_logged_and_told_to_a_parent_that_asked(make_checkpoint: Any) -> None:
    path = make_checkpoint("llama").path
    with start(path, subprocess.PIPE, **{REPORTS_LOADING: "1"}) as process:
        out, log = process.communicate(timeout=240)
    assert process.returncode == 0, log.decode()
    assert "━" not in log.decode()
    assert re.search(r"weights: 100% of [\d.]+ MB", log.decode())
    *loaded, ready = map(json.loads, out.splitlines())
    assert ready["ready"]
    sizes = [tuple(message["loaded"]) for message in loaded]
    assert sizes == sorted(sizes)
    assert sizes[-1][0] == sizes[-1][1]


def test_each_tenth_is_logged_once(caplog: Any) -> None:
    told: list[int] = []
    with caplog.at_level("INFO"):
        progress = LoadProgress("node", lambda done, total: told.append(done))
        for done in range(1001):
            progress(done, 1000, "a tensor")
    logged = [record.getMessage().split("%")[0] for record in caplog.records]
    assert logged == [f"weights: {10 * tenth}" for tenth in range(1, 11)]
    assert told == list(range(0, 1001, 10))
