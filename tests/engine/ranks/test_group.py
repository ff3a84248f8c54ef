"""What a group does about ranks that do not fit, die, hang or diverge."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.engine import Engine
from moonpool.engine.errors import CheckpointError, RankDiverged, RankLost, RankRefused
from moonpool.engine.ranks.process_handle import RankProcess
from moonpool.runtime.config.options import EngineOptions, ParallelOptions, TransferOptions
from tests.engine.conftest import Driver
from tests.engine.late_device import LateDevice
from tests.engine.ranks.conftest import TIMEOUT_S, ranks, serving
from tests.engine.ranks.test_exact import SHAPE
from tests.processes import stop

PROMPT = list(range(1, 20))


@pytest.fixture
def path(make_checkpoint) -> Path:
    return make_checkpoint("qwen2", **SHAPE).path


def edited(path: Path, to: Path, edit: Any) -> Path:
    """A copy of a checkpoint with other tensors."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    edit(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    "what",
    ["model", *(pytest.param(what, marks=pytest.mark.slow) for what in ("revision", "dtype", "plan"))],
)
async def test_a_rank_that_differs_is_refused_by_name(path, tmp_path, monkeypatch, what) -> None:
    other = edited(path, tmp_path / "other", lambda t: t["model.norm.weight"].add_(1))
    # Another revision may have the same weights, and say something else of how to compute with them.
    revised = edited(path, tmp_path / "revised", lambda t: None)
    config = revised / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 3e-6}))
    word, strange = {
        "model": ("model", {"model": str(other)}),
        "revision": ("model", {"model": str(revised)}),
        "dtype": ("dtype", {"dtype": "float16"}),
        "plan": ("plan", {}),
    }[what]
    async with ranks(2) as group:
        (rank,) = group.ranks
        load = rank.load

        def load_other(part, progress):
            stages = replace(part.options, parallel=replace(part.options.parallel, tp=1, pp=2))
            return load(replace(part, **(strange or {"options": stages})), progress)

        monkeypatch.setattr(rank, "load", load_other)
        with pytest.raises(RankRefused, match=rf"rank 1 is refused: its {word} is .+, the group's .+"):
            async with serving(path, group, tp=2):
                pass


async def test_a_tensor_missing_from_any_ranks_part_is_named(path, tmp_path) -> None:
    broken = edited(path, tmp_path / "broken", lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(RankLost, match=r"rank 2 .* tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        async with serving(broken, pp=3):
            pass
    broken = edited(path, tmp_path / "first", lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(CheckpointError, match=r"tensor model\.embed_tokens\.weight is missing"):
        async with serving(broken, pp=2):
            pass


async def test_weights_stream_in_with_progress_over_all_ranks(path) -> None:
    async with ranks(2) as group:
        reports: list[tuple[int, int, str]] = []
        opened = group.open

        async def open_with_reports(*arguments: Any, **words: Any) -> Any:
            words["progress"] = lambda *report: reports.append(report)
            return await opened(*arguments, **words)

        group.open = open_with_reports  # type: ignore[method-assign]
        async with serving(path, group, tp=2):
            assert reports[-1][0] == reports[-1][1]
            # Two halves make a whole, but for the norms, which both ranks read.
            nbytes = (path / "model.safetensors").stat().st_size
            assert 0.95 * nbytes < reports[-1][1] < 1.1 * nbytes


def exchanging() -> bool:
    """Whether a thread of ours is within an exchange with other ranks, now."""
    tops = sys._current_frames().values()
    files = {frame.f_code.co_filename for top in tops for frame, _ in traceback.walk_stack(top)}
    return any(Path(file).name in ("exchange_buffer.py", "shm.py", "torch_distributed.py") for file in files)


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOSSES = [
    # plan, the rank that is lost, how, and whether the leader waits for it in an exchange then, or is
    # anywhere in its steps.
    pytest.param({"tp": 2}, 1, KILL, "steps"),
    pytest.param({"tp": 2}, 1, STOP, "exchange"),
    pytest.param({"cp": 2}, 1, KILL, "steps"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ({"tp": 2}, 1, KILL, "exchange"),
            ({"tp": 2}, 1, STOP, "steps"),
            ({"cp": 2, "tp": 2}, 2, STOP, "exchange"),
            ({"cp": 4}, 3, KILL, "exchange"),
            ({"pp": 3}, 2, KILL, "steps"),
            ({"pp": 3}, 1, KILL, "exchange"),
            ({"pp": 3}, 1, STOP, "exchange"),
            ({"pp": 3}, 2, STOP, "steps"),
            ({"tp": 2, "pp": 2}, 2, KILL, "exchange"),
            ({"tp": 2, "pp": 2}, 3, STOP, "exchange"),
            ({"tp": 2, "ep": 2, "all_to_all_tokens": 1}, 1, KILL, "steps"),
            ({"tp": 2, "ep": 2, "all_to_all_tokens": 1}, 1, KILL, "exchange"),
            ({"tp": 2, "ep": 2, "all_to_all_tokens": 1}, 1, STOP, "exchange"),
            ({"tp": 2, "ep": 2, "all_to_all_tokens": 1, "link": "gloo"}, 1, STOP, "exchange"),
            ({"tp": 2, "link": "gloo"}, 1, KILL, "steps"),
            ({"tp": 2, "link": "gloo"}, 1, KILL, "exchange"),
            ({"tp": 2, "link": "gloo"}, 1, STOP, "exchange"),
            ({"pp": 3, "link": "gloo"}, 1, KILL, "exchange"),
            ({"pp": 3, "link": "gloo"}, 2, STOP, "exchange"),
        )
    ),
]


def loss_name(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{k}{v}" for k, v in value.items()).replace("link", "")
    return value.name if isinstance(value, signal.Signals) else str(value)


@pytest.mark.parametrize(("plan", "rank", "signal_number", "moment"), LOSSES, ids=loss_name)
async def test_a_rank_lost_in_the_middle_of_steps_ends_all_waiting_in_time(
    path, make_checkpoint, plan, rank, signal_number, moment
) -> None:
    # A stopped rank is lost when it has been silent for so long; on a busy machine others may be for a while.
    # The end of a process is noticed at once.
    timeout_s = 5.0 if signal_number is STOP else TIMEOUT_S
    path = make_checkpoint("qwen3_moe", **SHAPE).path if "ep" in plan else path
    with pytest.raises(RankLost, match="rank"):
        async with serving(path, timeout_s=timeout_s, **plan) as driver:
            group = driver.engine.ranks
            pids = [process.pid for process in group.ranks]
            request = driver.sequence(PROMPT, max_tokens=200, ignore_eos=True)
            if moment == "steps":
                driver.engine.add(request)
                await driver.until(lambda: driver.num_steps >= 10)
                began_s = time.monotonic()
                os.kill(pids[rank - 1], signal_number)
            else:
                # Stopped before the first step: what waits for it then cannot go on, whatever the timing.
                began_s = time.monotonic()
                stop(pids[rank - 1])
                driver.engine.add(request)
                while not exchanging():  # another thread's
                    assert group.lost is None, group.lost
                    await asyncio.sleep(0.001)
                if signal_number == signal.SIGKILL:
                    began_s = time.monotonic()
                    os.kill(pids[rank - 1], signal_number)
            with pytest.raises(RankLost, match=rf"rank {rank}|torch.distributed"):
                await asyncio.wait_for(driver.engine.wait(), 60)
            if moment == "exchange":  # and so in a step
                assert driver.results[request.key].events[-1].ended_life
            # Sooner than by any other limit. The machine is shared: it takes a moment where that is free.
            assert time.monotonic() - began_s < 30
            assert not any(result.finish_reason for result in driver.results.values())
            await driver.engine.close()
            assert not exchanging()
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a rank outlived its group"
            raise group.lost or RankLost(0, "by its link")


NOISE = """
import os, sys, threading, time
def later():
    # As NCCL does whenever it likes; the interpreter reads its program first.
    while "moonpool.engine.ranks.worker" not in str(getattr(sys.modules["__main__"], "__spec__", "")):
        time.sleep(0.01)
    while getattr(sys.modules["__main__"], "_reports", sys.stdout) is sys.stdout:
        time.sleep(0.001)
    while True:
        os.write(1, b"and la")
        time.sleep(0.001)
if "MOONPOOL_RANK" in os.environ:
    os.write(1, b"NCCL version 2.27\\n[1, 2]\\nhalf a li")  # as a library does at its import
    threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.slow
async def test_what_a_library_prints_in_a_rank_hides_no_report(
    path, tmp_path, monkeypatch, make_checkpoint, caplog
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    checkpoint = make_checkpoint("qwen2", **SHAPE)
    async with serving(path, tp=2) as driver:
        (result,) = await driver.run(driver.sequence(PROMPT, max_tokens=8))
        assert result.token_ids == checkpoint.greedy(PROMPT, 8)
        await driver.engine.refresh_expert_load()
    assert "rank 1 printed: NCCL version 2.27" in caplog.text


async def test_a_rank_lost_while_nothing_runs_is_noticed(path) -> None:
    async with serving(path, tp=2) as driver:
        os.kill(driver.engine.ranks.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 is lost: it ended by signal 9"):
            await asyncio.wait_for(driver.engine.wait(), 60)


async def test_ranks_that_ran_other_batches_are_found_out(path) -> None:
    async with serving(path, tp=2) as driver:
        driver.engine._loop.runner._rank_step.digest ^= 1
        driver.engine.add(driver.sequence(PROMPT, max_tokens=2))
        with pytest.raises(RankDiverged, match=r"rank 1 is lost: at step \d+ its digest of all batches"):
            await asyncio.wait_for(driver.engine.wait(), 60)


@pytest.mark.slow
async def test_an_error_of_the_leader_ends_the_group(path, monkeypatch) -> None:
    """Where the leader stumbled the others stand in the middle of a step."""
    async with serving(path, tp=2) as driver:

        def catch_fire(*args: object) -> None:
            raise ValueError("the sampler caught fire")

        monkeypatch.setattr("moonpool.engine.execution.runner.sample", catch_fire)
        driver.engine.add(driver.sequence(PROMPT, max_tokens=2))
        with pytest.raises(RankLost, match="ValueError: the sampler caught fire"):
            await asyncio.wait_for(driver.engine.wait(), 60)


async def test_a_rank_that_does_not_come_is_named(path) -> None:
    async with ranks(2) as group:
        stop(group.ranks[0].pid)
        with pytest.raises(RankLost, match=r"rank 1 is lost: it made no progress for 1 s"):
            async with serving(path, group, tp=2, start_timeout_s=1.0):
                pass


@pytest.mark.slow
async def test_a_start_may_take_long_while_it_makes_progress(path, monkeypatch) -> None:
    read = Checkpoint.read

    def slowly(checkpoint: Checkpoint, name: str) -> Any:
        time.sleep(0.3)  # the time of a large tensor
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "read", slowly)
    async with ranks(2) as group:
        began_s = time.monotonic()
        async with serving(path, group, tp=2, start_timeout_s=8.0):
            assert time.monotonic() - began_s > 8.0


async def test_a_rank_that_starts_no_transfer_agent_is_named(path, monkeypatch) -> None:
    async def forever(*_: object) -> tuple[bytes, int]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(RankProcess, "start_agent", forever)
    async with ranks(2) as group, serving(path, group, tp=2) as driver:
        group._start_timeout_s = 1.0  # a busy machine takes longer to start them
        for wait in (group.start_agents(TransferOptions(), "node", 1), driver.engine.wait()):
            with pytest.raises(RankLost, match=r"rank 1 is lost: it started no transfer agent within 1 s"):
                await asyncio.wait_for(wait, 30)


FITTING = """
import os
if "MOONPOOL_RANK" in os.environ:
    import moonpool.engine.execution.gpu_memory as gpu_memory
    gpu_memory.choose_num_blocks = lambda *arguments, **_: 40 if arguments[4] is None else arguments[4]
"""


@pytest.mark.slow
async def test_ranks_take_as_many_blocks_as_fit_on_each(make_checkpoint, tmp_path, monkeypatch) -> None:
    """The leader's device has room for many more than the other rank's."""
    (tmp_path / "sitecustomize.py").write_text(FITTING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    checkpoint = make_checkpoint("qwen2", **SHAPE)
    options = EngineOptions(block_size=8, parallel=ParallelOptions(tp=2))
    engine = Engine(checkpoint.path, options, device=LateDevice(), separate_pools=True)
    driver = Driver(engine)
    await engine.start()
    try:
        assert engine.pool.num_blocks == 40
        (result,) = await driver.run(driver.sequence(PROMPT, max_tokens=8))
        assert result.token_ids == checkpoint.greedy(PROMPT, 8)
    finally:
        await engine.close()
