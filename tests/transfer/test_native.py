"""The compiled copy: every byte where it belongs, none elsewhere, and the checksum all others compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from moonpool.transfer.copying.memcpy import copy_here
from moonpool.transfer.memory.checksum import checksums
from moonpool.transfer.native.arrays import U64, address_of
from moonpool.transfer.native.compiled_copy import (
    NEVER,
    SHORT_NBYTES,
    CompiledCopy,
    compiled_copy,
    forms,
    library,
)

ROOM = 4 << 20
LENGTHS = [*range(1, 300), *range(1000, 1100), *range(2040, 2060), 4096, 65_537, 1 << 20, (3 << 20) + 13]


@pytest.fixture(scope="module", params=forms(), ids=lambda form: form or "plain")
def compiled(request: pytest.FixtureRequest) -> CompiledCopy:
    return CompiledCopy(library(request.param).build())


@pytest.fixture(scope="module")
def source() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, ROOM, np.uint8)


def column(*values: int) -> U64:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("shift", [0, 1, 32])
def test_runs_of_every_length(compiled: CompiledCopy, source: np.ndarray, shift: int) -> None:
    """shift: of the destination from where lines begin; the source lies elsewhere in its own."""
    to = np.zeros(ROOM + 256, np.uint8)
    first = -address_of(to) % 64 + 64 + shift
    for nbytes in LENGTHS:
        digest = np.zeros(1, np.uint64)
        run = source[7 : 7 + nbytes]
        assert compiled.move(
            column(address_of(to) + first), column(address_of(run)), column(nbytes), digests=digest
        )
        assert np.array_equal(to[first : first + nbytes], run)
        assert not to[:first].any()
        assert not to[first + nbytes :].any()
        if nbytes > SHORT_NBYTES:
            assert int(digest[0]) == xxhash.xxh3_64_intdigest(run)
        to[first : first + nbytes] = 0


def test_many_runs_in_one_call(compiled: CompiledCopy, source: np.ndarray) -> None:
    """More than the caches hold, so that stores go past them."""
    order = np.random.default_rng(2).permutation(ROOM >> 12).astype(np.uint64) << np.uint64(12)
    to, digests = np.zeros(ROOM, np.uint8), np.zeros(len(order), np.uint64)
    sizes = np.full(len(order), 4096, np.uint64)
    here = np.arange(len(order), dtype=np.uint64) * np.uint64(4096) + np.uint64(address_of(to))
    assert compiled.move(here, order + np.uint64(address_of(source)), sizes, digests=digests)
    expected = source.reshape(-1, 4096)[(order >> np.uint64(12)).astype(np.intp)]
    assert np.array_equal(to.reshape(-1, 4096), expected)
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(row) for row in expected]


@pytest.mark.parametrize("size", [64, 256, 320, 1024, 3 * 1024, 64 << 10])
def test_one_checksum_of_what_lies_in_runs(compiled: CompiledCopy, source: np.ndarray, size: int) -> None:
    """Runs of any multiple of a stripe, of which the last may end anywhere; spans of one run among them."""
    draw = np.random.default_rng(size)
    sizes: list[int] = []
    counts: list[int] = []
    while sum(sizes) < ROOM // 2:
        count = int(draw.integers(1, 9))
        sizes += [int(draw.integers(1, 5)) * size for _ in range(count)]
        sizes[-1] += int(draw.integers(0, 64))
        counts.append(count)
    nbytes = np.array(sizes, np.uint64)
    begins = np.cumsum(nbytes) - nbytes
    # Where they lie has nothing to do with their order.
    there = np.empty_like(begins)
    shuffled = draw.permutation(len(nbytes))
    there[shuffled] = np.cumsum(nbytes[shuffled]) - nbytes[shuffled]
    to, digests = np.zeros(ROOM, np.uint8), np.zeros(len(counts), np.uint64)
    here, there = begins + np.uint64(address_of(to)), there + np.uint64(address_of(source))
    rows = np.array(counts, np.uint32)
    assert compiled.move(here, there, nbytes, digests=digests, counts=rows)
    ends = np.cumsum(nbytes)[np.cumsum(counts) - 1].tolist()
    expected = [to[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    long = [i for i, span in enumerate(expected) if len(span) > SHORT_NBYTES]
    assert [int(digests[i]) for i in long] == [xxhash.xxh3_64_intdigest(expected[i]) for i in long]
    for begin, address, n in zip(
        begins.tolist(), (there - np.uint64(address_of(source))).tolist(), sizes, strict=True
    ):
        assert np.array_equal(to[begin : begin + n], source[address : address + n])
    again = np.zeros_like(digests)
    assert compiled.move(None, there, nbytes, digests=again, counts=rows)
    assert np.array_equal(again, digests)


def test_looking_without_copying(compiled: CompiledCopy, source: np.ndarray) -> None:
    digests = np.zeros(2, np.uint64)
    addresses = column(address_of(source), address_of(source) + 3)
    assert compiled.move(None, addresses, column(5000, 700), digests=digests)
    assert digests.tolist() == [
        xxhash.xxh3_64_intdigest(source[:5000]),
        xxhash.xxh3_64_intdigest(source[3:703]),
    ]


def test_a_stopped_copy_touches_nothing_more(compiled: CompiledCopy, source: np.ndarray) -> None:
    to, stop = np.zeros(ROOM, np.uint8), np.ones(1, np.uint8)
    assert not compiled.move(column(address_of(to)), column(address_of(source)), column(ROOM), stop=stop)
    assert not to.any()


@pytest.fixture(params=["compiled", "plain"])
def either(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh_compiled_copy: None
) -> None:
    monkeypatch.setenv("MOONPOOL_TRANSFER", "plain" if request.param == "plain" else "")
    assert (compiled_copy() is None) == (request.param == "plain")


@pytest.mark.usefixtures("either")
def test_checksums_and_copies_are_the_same_without_a_compiler(source: np.ndarray) -> None:
    sizes = np.array([1, 17, 240, 241, 4096, 1 << 20], np.uint64)
    offsets = np.cumsum(sizes) - sizes
    there = offsets + np.uint64(address_of(source))
    expected = [
        xxhash.xxh3_64_intdigest(source[int(offset) : int(offset + size)])
        for offset, size in zip(offsets, sizes, strict=True)
    ]
    assert checksums(there, sizes).tolist() == expected
    to, digests = np.zeros(ROOM, np.uint8), np.zeros(len(sizes), np.uint64)
    assert copy_here(offsets + np.uint64(address_of(to)), there, sizes, NEVER, digests)
    assert digests.tolist() == expected
    whole = int(sizes.sum())
    assert np.array_equal(to[:whole], source[:whole])


def test_without_a_compiler_it_is_said_once(tmp_path: Path) -> None:
    program = (
        "from moonpool.transfer.native.compiled_copy import compiled_copy; "
        "print(compiled_copy(), compiled_copy())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "None None"
    assert done.stderr.count("no C++ compiler found") == 1
