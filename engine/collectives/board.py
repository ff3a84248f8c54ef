"""The shared board of a group: each rank's progress, the batch of a step, the abort flag."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.engine.collectives.futex import Futex
from moonpool.engine.errors import RankLost
from moonpool.runtime.service.heartbeat import BEATS_PER_TIMEOUT, Heartbeat

MAX_STEPS_IN_FLIGHT = 8
# Words of the group; the last two of each of the steps in flight.
_ABORTED, _STEP, _NBYTES, _PUBLISHED_NS = 0, 1, 8, 8 + MAX_STEPS_IN_FLIGHT
_GROUP_WORDS = 64
# Words of a rank: ``BoardWord``, then ``StepWord`` of each of the steps in flight.
_STEP_WORDS_AT, _STEP_WORDS = 64, 8
_RANK_WORDS = _STEP_WORDS_AT + _STEP_WORDS * MAX_STEPS_IN_FLIGHT
_LINE_NBYTES = 64

# A waiting rank first spins, then yields the core, then sleeps between two checks.
_SPINS = 50
_YIELD_S = 0.002
_SLEEP_S = 0.00005
_MONITOR_S = 0.05


class BoardWord(IntEnum):
    """Words of a rank. Those that others wait for have their own cache lines, each with the times of its last
    two values behind it: see ``SharedBoard.advance``."""

    EXCHANGED = 0  # exchanges with the tp ranks
    SENT = 8
    RECEIVED = 16
    GATHERED = 24
    DONE = 32
    CP_EXCHANGED = 56  # exchanges with the cp ranks
    HEARTBEAT_NS = 48  # CLOCK_MONOTONIC, equal for all processes of a machine


class StepWord(IntEnum):
    """Words of a rank for one step, posted before it is DONE; valid until as many steps were published as
    may be in flight."""

    DIGEST = 0  # of all batches up to this step
    COMPUTE_NS = 1
    COLLECTIVE_NS = 2
    BUBBLE_NS = 3
    ALL_TO_ALL_NS = 4
    EXCHANGE_NS = 5  # of COLLECTIVE_NS: the rank's own part, without waiting for others


class SharedMemory:
    """Anonymous memory that other processes open by ``path``; freed with its last mapping.

    ``fd``: of the memfd, -1 once closed.
    """

    def __init__(self, path: str, nbytes: int, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Create zeroed memory. Processes of this user can open it while this process lives."""
        fd = os.memfd_create(f"moonpool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # Sealed, so that a mapping never loses pages.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(f"/proc/{os.getpid()}/fd/{fd}", nbytes, fd)

    @classmethod
    def open(cls, path: str) -> SharedMemory:
        """Map existing memory. Raises OSError when its creator has ended."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(path, Path(path).stat().st_size, fd)

    def close(self) -> None:
        """Close the path; the bytes stay while ``array`` is referenced. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedBoard:
    """One rank's view of the board. Each word has one writer; x86-64 keeps the order of its stores.

    Every wait raises RankLost when the group is aborted or the leader's heartbeat stops. At most
    ``MAX_STEPS_IN_FLIGHT`` steps are published that not all ranks are done with.

    remote_ranks: ranks of other machines; the threads of their calls write their words here. What other
    machines must know is told by ``on_publish`` (a step's number and its
    batch), ``on_done`` (the step) and ``on_beat``, in the thread that posts it.
    waited_ns: in waits until the other rank was there; not the time after that until this rank went on.
    """

    def __init__(self, memory: SharedMemory, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.remote_ranks = range(0)
        self.waited_ns = 0
        self.on_publish: list[Callable[[int, npt.NDArray[np.uint8]], None]] = []
        self.on_done: list[Callable[[int], None]] = []
        self.on_beat: list[Callable[[], None]] = []
        self._memory = memory
        control_nbytes = self._control_nbytes(world_size)
        words = memory.array[:control_nbytes].view(np.int64)
        self._words = memoryview(words.data)
        self._payloads = memory.array[control_nbytes:].reshape(MAX_STEPS_IN_FLIGHT, -1)
        self._step = Futex(words, _STEP)
        self._done = [Futex(words, self._index(other, BoardWord.DONE)) for other in range(world_size)]

    @classmethod
    def create(cls, world_size: int, payload_nbytes: int, timeout_s: float) -> SharedBoard:
        """Create the leader's view. ``payload_nbytes``: of the largest batch of a step."""
        batch_nbytes = -(-payload_nbytes // _LINE_NBYTES) * _LINE_NBYTES
        nbytes = cls._control_nbytes(world_size) + MAX_STEPS_IN_FLIGHT * batch_nbytes
        memory = SharedMemory.create("board", nbytes)
        return cls(memory, 0, world_size, timeout_s)

    @staticmethod
    def _control_nbytes(world_size: int) -> int:
        return 8 * (_GROUP_WORDS + _RANK_WORDS * world_size)

    def as_rank(self, rank: int) -> SharedBoard:
        """Return the view of ``rank``, for a thread that writes its words."""
        return SharedBoard(self._memory, rank, self.world_size, self.timeout_s)

    @property
    def path(self) -> str:
        return self._memory.path

    def close(self) -> None:
        self._memory.close()

    @staticmethod
    def _index(rank: int, word: BoardWord) -> int:
        return _GROUP_WORDS + _RANK_WORDS * rank + word

    @staticmethod
    def _step_index(rank: int, step: int, word: StepWord) -> int:
        slot = step % MAX_STEPS_IN_FLIGHT
        return _GROUP_WORDS + _RANK_WORDS * rank + _STEP_WORDS_AT + _STEP_WORDS * slot + word

    def count(self, rank: int, word: BoardWord) -> int:
        return self._words[_GROUP_WORDS + _RANK_WORDS * rank + word]

    def of_step(self, rank: int, step: int, word: StepWord) -> int:
        """Return what ``rank``, which is done with ``step``, posted about it."""
        return self._words[self._step_index(rank, step, word)]

    def post_of_step(self, step: int, word: StepWord, value: int) -> None:
        """Set a word of this rank about ``step``, before it is done with it."""
        self._words[self._step_index(self.rank, step, word)] = value

    def post(self, word: BoardWord, value: int) -> None:
        """Set a word of this rank. Others that see it also see all memory written before."""
        self._words[_GROUP_WORDS + _RANK_WORDS * self.rank + word] = value

    def advance(self, word: BoardWord, count: int) -> None:
        """Post the next count of a word that others ``wait`` for, and when. A rank that still waits for
        ``count - 2`` takes this time for that one's."""
        index = _GROUP_WORDS + _RANK_WORDS * self.rank + word
        self._words[index + 1 + (count & 1)] = time.perf_counter_ns()  # equal for all processes of a machine
        self._words[index] = count

    def wait(self, rank: int, word: BoardWord, value: int) -> None:
        """Wait until the word of ``rank`` is at least ``value``. Raises RankLost."""
        words, index = self._words, _GROUP_WORDS + _RANK_WORDS * rank + word
        for _ in range(_SPINS):
            if words[index] >= value:
                return
        began_ns = time.perf_counter_ns()
        began_s = monitored_s = time.monotonic()
        while words[index] < value:
            now_s = time.monotonic()
            if now_s - began_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_S)
            if now_s - monitored_s > _MONITOR_S:
                monitored_s = now_s
                self.check()
        self.waited_ns += max(words[index + 1 + (value & 1)] - began_ns, 0)

    def post_done(self, step: int) -> None:
        """Post that this rank is done with ``step``, after its words of the step."""
        self.advance(BoardWord.DONE, step)
        self._done[self.rank].wake()
        for tell in self.on_done:
            tell(step)

    def wait_done(self, rank: int, step: int) -> None:
        """Wait until ``rank`` is done with ``step``. For a remote rank it sleeps in the kernel at once:
        spinning would delay the thread of its call. Raises RankLost."""
        if rank not in self.remote_ranks:
            self.wait(rank, BoardWord.DONE, step)
            return
        while (done := self.count(rank, BoardWord.DONE)) < step:
            self._done[rank].wait(done, _MONITOR_S)
            self.check()

    def beat(self) -> None:
        """Post that this process runs. From any thread."""
        self.post(BoardWord.HEARTBEAT_NS, time.monotonic_ns())
        for tell in self.on_beat:
            tell()

    def start_heartbeat(self) -> Heartbeat:
        """Beat on a thread, several times within the timeout, until the result is stopped."""
        return Heartbeat(self.beat, self.timeout_s / BEATS_PER_TIMEOUT)

    def silent_s(self, rank: int) -> float:
        """Return the seconds since the last heartbeat of ``rank``; 0 before the first."""
        beat_ns = self.count(rank, BoardWord.HEARTBEAT_NS)
        return (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else 0.0

    def abort(self, rank: int) -> None:
        """Make all waits raise RankLost of ``rank``. Only the first call counts."""
        if not self._words[_ABORTED]:
            self._words[_ABORTED] = rank + 1
            self._step.wake()

    @property
    def is_aborted(self) -> bool:
        return bool(self._words[_ABORTED])

    def check(self) -> None:
        """Raise RankLost if the group is aborted or its leader silent."""
        if aborted := self._words[_ABORTED]:
            raise RankLost(aborted - 1, "the group was aborted")
        if self.rank and self.silent_s(0) > self.timeout_s:
            # If this process was stopped, or the machine, heartbeats may wait to be read or sent.
            time.sleep(self.timeout_s / BEATS_PER_TIMEOUT)
            if (silent_s := self.silent_s(0)) > self.timeout_s:
                raise RankLost(0, f"the leader has been silent for {silent_s:.1f} s")

    def publish(self, step: int, nbytes: int) -> None:
        """Publish ``payload(step)[:nbytes]`` as the batch of ``step``, the one after the last."""
        slot = step % MAX_STEPS_IN_FLIGHT
        self._words[_NBYTES + slot] = nbytes
        self._words[_PUBLISHED_NS + slot] = time.perf_counter_ns()
        self._words[_STEP] = step
        self._step.wake()
        for publish in self.on_publish:
            publish(step, self.batch(step))

    def wait_step(self, seen: int) -> int:
        """Wait for the step after ``seen`` and return its number. Sleeps in the kernel after a short time."""
        words = self._words
        for _ in range(_SPINS):
            if words[_STEP] > seen:
                return seen + 1
        began_s = time.monotonic()
        while words[_STEP] <= seen:
            if time.monotonic() - began_s < _YIELD_S:
                os.sched_yield()
            else:
                self._step.wait(seen, _MONITOR_S)
                self.check()
        return seen + 1

    def published_ns(self, step: int) -> int:
        """When its batch was published on this machine, by ``time.perf_counter_ns``."""
        return self._words[_PUBLISHED_NS + step % MAX_STEPS_IN_FLIGHT]

    def payload(self, step: int) -> npt.NDArray[np.uint8]:
        """Return the room for the batch of ``step``."""
        payload: npt.NDArray[np.uint8] = self._payloads[step % MAX_STEPS_IN_FLIGHT]
        return payload

    def batch(self, step: int) -> npt.NDArray[np.uint8]:
        """Return a view of the published batch of ``step``."""
        return self.payload(step)[: self._words[_NBYTES + step % MAX_STEPS_IN_FLIGHT]]
