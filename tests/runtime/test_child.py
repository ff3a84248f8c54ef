"""Child processes: ready line, messages, stop, and errors with the end of the log."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from moonpool.runtime.errors import ChildFailed
from moonpool.runtime.service.child import Child


def python(program: str, tmp_path: Path) -> Child:
    return Child("worker", [sys.executable, "-c", program], tmp_path / "worker.log", sends_json=True)


async def test_ready_line_and_a_clean_stop(tmp_path: Path) -> None:
    child = python(
        "import time; print('warming up'); print('{\"url\": \"here\"}', flush=True); time.sleep(60)", tmp_path
    )
    await child.start()
    await child.wait_ready(60)
    assert child.ready == {"url": "here"}
    await child.stop(60)
    assert child.returncode == -15
    await child.stop(60)


async def test_output_after_ready_does_not_block_it(tmp_path: Path) -> None:
    child = python("print('{}', flush=True); print('x' * 1_000_000, flush=True)", tmp_path)
    await child.start()
    await child.wait_ready(60)
    assert await child.wait() == 0


async def test_death_before_ready_shows_the_log(tmp_path: Path) -> None:
    child = python("raise SystemExit('out of luck')", tmp_path)
    await child.start()
    with pytest.raises(ChildFailed, match=r"(?s)worker ended with code 1 .*worker\.log:\nout of luck"):
        await child.wait_ready(60)


async def test_wait_ready_times_out(tmp_path: Path) -> None:
    child = python("import time; time.sleep(60)", tmp_path)
    await child.start()
    with pytest.raises(ChildFailed, match="was not ready within 0 s"):
        await child.wait_ready(0.05)
    await child.stop(60)


async def test_stop_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    program = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)"
    )
    child = python(program, tmp_path)
    await child.start()
    await child.wait_ready(60)
    await child.stop(0.1)
    assert child.returncode == -9


async def test_stdin_and_messages_after_ready(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    program = "import sys; print('{}'); print(sys.stdin.read()); print('{no JSON'); print('{\"n\": 2}')"
    child = Child(
        "worker",
        [sys.executable, "-c", program],
        None,
        sends_json=True,
        stdin=b'{"n": 1}',
        on_message=heard.append,
    )
    await child.start()
    await child.wait_ready(60)
    assert await child.wait() == 0
    while len(heard) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert heard == [{"n": 1}, {"n": 2}]


async def test_a_full_disk_under_its_log_neither_blocks_nor_hides_a_child() -> None:
    """What it prints is lost, and it goes on; here it would wait for a reader for ever."""
    program = "print('x' * 1_000_000, flush=True); print('{\"url\": \"here\"}', flush=True)"
    child = Child("worker", [sys.executable, "-c", program], Path("/dev/full"), sends_json=True)
    await child.start()
    await child.wait_ready(60)
    assert child.ready == {"url": "here"}
    assert await child.wait() == 0


async def test_the_end_of_the_log_is_not_its_progress(tmp_path: Path) -> None:
    loaded = "print('{\"loaded\": [1, 2]}\\n' * 1000, flush=True)"
    child = python(f"print('out of room', end=''); {loaded}; raise SystemExit(1)", tmp_path)
    await child.start()
    with pytest.raises(ChildFailed) as raised:
        await child.wait_ready(60)
    assert "out of room" in str(raised.value)
    assert str(raised.value).count("loaded") <= 1  # the one on the same line
