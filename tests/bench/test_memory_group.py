"""A real limit: the kernel kills a process that takes more."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.bench.harness.memory_group import MemoryGroup, NoMemoryGroups, memory_group

LIMIT_NBYTES = 64 << 20
# Takes so many bytes once it is told, and then says so.
PROGRAM = """
import sys
n = int(sys.stdin.readline())
taken = b'x' * n
print(n, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group(LIMIT_NBYTES) as group:
            yield group
    except NoMemoryGroups as error:
        pytest.skip(str(error))


def started(group: MemoryGroup) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    group.add(process.pid)
    return process


def test_a_process_beyond_the_limit_is_killed_and_others_are_not(group: MemoryGroup) -> None:
    with started(group) as process:
        out, _ = process.communicate(f"{2 * LIMIT_NBYTES}\n")
    assert (process.returncode, out, group.num_killed()) == (-signal.SIGKILL, "", 1)
    with started(group) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{LIMIT_NBYTES // 2}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{LIMIT_NBYTES // 2}\n"
        assert LIMIT_NBYTES // 2 <= group.used_nbytes() < LIMIT_NBYTES
    assert (process.returncode, group.num_killed()) == (0, 1)


def test_a_group_is_gone_after_its_block() -> None:
    try:
        with memory_group(LIMIT_NBYTES) as group:
            directory: Path = group._directory
            assert directory.is_dir()
    except NoMemoryGroups as error:
        pytest.skip(str(error))
    assert not directory.exists()
