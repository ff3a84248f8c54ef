"""PagedAttention (SOSP'23), figure 2: the part of the KV memory that holds tokens, by how it is allocated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from moonpool.bench.paper.setup import PAPER, Lengths, holds, requests
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.inputs.trace import TraceRequest

_SLOTS = 15_700
_MOST_TOKENS = 2048
_BLOCK = 16
_COUNT, _STEPS = 4000, 6000

TERMS = f"""\
OPT-13B on a 40 GB A100: {_SLOTS:,} KV slots, as in the paper. Generated requests with ShareGPT's mean
lengths (161 + 338 tokens; log-normal, deviation of the logarithm 1, at most {_MOST_TOKENS:,} together);
there is always one that waits, in order, and every step adds a token to each that runs. Mean over
{_STEPS:,} steps. Orca's forms take one contiguous region a request from a buddy allocator: of the longest
length (max), of the prompt and the output's next power of two (pow2), or of the true length (oracle).
Paged: blocks of {_BLOCK} as they fill; without a free one the request that came last starts again.
"""
# Percent that held tokens, the figure's.
PAPER_HELD = {"Orca (max)": 20.4, "Orca (pow2)": 26.8, "Orca (oracle)": 38.2, "paged": 96.3}


class Buddy:
    """Regions of powers of two within ``num_slots``."""

    def __init__(self, num_slots: int) -> None:
        self._free: dict[int, set[int]] = {}  # the beginnings of free regions, by size
        begin = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self._free.setdefault(1 << bit, set()).add(begin)
                begin += 1 << bit

    def take(self, num_slots: int) -> tuple[int, int] | None:
        """Return begin and size of a region with room for ``num_slots``; None: there is none."""
        size = 1 << (num_slots - 1).bit_length()
        fitting = [one for one, begins in self._free.items() if begins and one >= size]
        if not fitting:
            return None
        found = min(fitting)
        begin = min(self._free[found])
        self._free[found].remove(begin)
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(begin + found)
        return begin, size

    def give_back(self, region: tuple[int, int]) -> None:
        begin, size = region
        # A region and its buddy differ in one bit, because every region begins at a multiple of its size.
        while begin ^ size in self._free.setdefault(size, set()):
            self._free[size].remove(begin ^ size)
            begin, size = min(begin, begin ^ size), 2 * size
        self._free[size].add(begin)

    @property
    def num_free(self) -> int:
        return sum(size * len(begins) for size, begins in self._free.items())


class _Memory(ABC):
    @abstractmethod
    def start(self, key: int, request: TraceRequest) -> bool:
        """Take what the request needs to begin; False: there is no room."""

    @abstractmethod
    def grow(self, key: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` in all; False: there is none."""

    @abstractmethod
    def end(self, key: int) -> None: ...


class _Contiguous(_Memory):
    """``needed``: slots that a request may ever need, by its allocation."""

    def __init__(self, needed: Callable[[TraceRequest], int]) -> None:
        self._buddy, self._needed = Buddy(_SLOTS), needed
        self._regions: dict[int, tuple[int, int]] = {}

    def start(self, key: int, request: TraceRequest) -> bool:
        region = self._buddy.take(min(self._needed(request), _MOST_TOKENS))
        if region is not None:
            self._regions[key] = region
        return region is not None

    def grow(self, key: int, num_tokens: int) -> bool:
        return True

    def end(self, key: int) -> None:
        self._buddy.give_back(self._regions.pop(key))


class _Paged(_Memory):
    def __init__(self) -> None:
        self._num_free = _SLOTS // _BLOCK
        self._held: dict[int, int] = {}

    def start(self, key: int, request: TraceRequest) -> bool:
        self._held[key] = 0
        if self.grow(key, request.input_tokens):
            return True
        del self._held[key]
        return False

    def grow(self, key: int, num_tokens: int) -> bool:
        more = -(-num_tokens // _BLOCK) - self._held[key]
        if more > self._num_free:
            return False
        self._num_free -= more
        self._held[key] += more
        return True

    def end(self, key: int) -> None:
        self._num_free += self._held.pop(key)


def _memories() -> dict[str, _Memory]:
    return {
        "Orca (max)": _Contiguous(lambda request: _MOST_TOKENS),
        "Orca (pow2)": _Contiguous(
            lambda request: request.input_tokens + (1 << (request.output_tokens - 1).bit_length())
        ),
        "Orca (oracle)": _Contiguous(lambda request: request.input_tokens + request.output_tokens),
        "paged": _Paged(),
    }


def workload() -> list[TraceRequest]:
    prompt, output = Lengths.of_mean(161, 1.0), Lengths.of_mean(338, 1.0)
    return requests(_COUNT, prompt, output, most=_MOST_TOKENS, block_tokens=_BLOCK, seed=1)


def measure(trace: Sequence[TraceRequest], say: Callable[[str], None]) -> list[Row]:
    """Return the part of each allocation beside the paper's, and whether their order is the same."""
    held: dict[str, float] = {}
    rows: list[Row] = []
    for name, memory in _memories().items():
        say(name)
        held[name] = 100 * held_part(memory, trace, _STEPS)
        row = Row(name, "KV memory that holds tokens", held[name], "% of the slots")
        rows.append(versus(row, PAPER, PAPER_HELD[name]))
    ordered = sorted(held, key=held.__getitem__) == list(PAPER_HELD)
    return [*rows, holds("all", "order as in the paper", ordered)]


def held_part(memory: _Memory, trace: Sequence[TraceRequest], num_steps: int) -> float:
    """The mean part of all slots that hold a token. ``trace`` is repeated as often as needed."""
    waiting, running = deque(range(len(trace))), dict[int, int]()  # tokens of each that runs
    num_held = 0
    for _ in range(num_steps):
        for key in list(running):
            if key in running:
                _add_token(memory, running, waiting, key)
        for key in [key for key, tokens in running.items() if tokens >= _total(trace[key])]:
            memory.end(key)
            del running[key]
            waiting.append(key)
        while waiting and memory.start(waiting[0], trace[waiting[0]]):
            key = waiting.popleft()
            running[key] = trace[key].input_tokens
        num_held += sum(running.values())
    return num_held / (num_steps * _SLOTS)


def _total(request: TraceRequest) -> int:
    return request.input_tokens + request.output_tokens


def _add_token(memory: _Memory, running: dict[int, int], waiting: deque[int], key: int) -> None:
    """Add a token to ``key``. Without room, those that came last wait again, ``key`` itself at worst."""
    while not memory.grow(key, running[key] + 1):
        last = next(reversed(running))
        memory.end(last)
        del running[last]
        waiting.appendleft(last)
        if last == key:
            return
    running[key] += 1
