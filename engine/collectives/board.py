"""Memory the ranks of a group share: who has come how far, the batch of a step, whether the group is
aborted."""

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

_ABORTED, _STEP, _NBYTES = range(3)  # words of the group
_GROUP_WORDS = 64
_RANK_WORDS = 64

# A rank that waits looks again at once, then lets others have the core, then sleeps between two looks.
_EAGER_LOOKS = 50
_YIELD_S = 0.002
_NAP_S = 0.00005
_MONITOR_S = 0.05


class BoardWord(IntEnum):
    """Words of a rank, in cache lines of their own where they are waited for."""

    EXCHANGED = 0  # with those it splits matrices with
    SENT = 8
    RECEIVED = 16
    GATHERED = 24
    DONE = 32
    DIGEST = 40  # of all batches up to DONE
    COMPUTE_NS = 41  # in the step DONE, and so the following
    COLLECTIVE_NS = 42
    BUBBLE_NS = 43
    ALL_TO_ALL_NS = 44
    CP_EXCHANGED = 56  # with the other shares of its stage
    HEARTBEAT_NS = 48  # CLOCK_MONOTONIC, which all processes of a machine share


class SharedMemory:
    """Memory without a name that other processes open by ``path``, and that goes with the last of them.

    ``fd``: of the memfd, -1 once closed.
    """

    def __init__(self, path: str, nbytes: int, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """Zeroed, its pages present when first written. Open to this user's processes while we live."""
        fd = os.memfd_create(f"moonpool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # Who maps it need not fear that it shrinks.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(f"/proc/{os.getpid()}/fd/{fd}", nbytes, fd)

    @classmethod
    def open(cls, path: str) -> SharedMemory:
        """Raises OSError when its creator is gone."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(path, Path(path).stat().st_size, fd)

    def close(self) -> None:
        """Give up the name; the bytes go when nobody refers to ``array`` any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedBoard:
    """One rank's view. Each word has one writer; on x86-64 its stores are seen in their order.

    Waiting ends with RankLost when the leader has aborted the group, or is not heard of any more.

    remote_ranks: ranks of other machines; the relay's thread writes their words here. ``on_publish``: called
    with every step's number and batch, in the thread that published it.
    """

    def __init__(self, memory: SharedMemory, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.remote_ranks = range(0)
        self.on_publish: Callable[[int, npt.NDArray[np.uint8]], None] | None = None
        self._memory = memory
        control_nbytes = self._control_nbytes(world_size)
        words = memory.array[:control_nbytes].view(np.int64)
        self._words = memoryview(words.data)
        self._payload = memory.array[control_nbytes:]
        self._step = Futex(words, _STEP)
        self._done = [Futex(words, self._index(other, BoardWord.DONE)) for other in range(world_size)]

    @classmethod
    def create(cls, world_size: int, payload_nbytes: int, timeout_s: float) -> SharedBoard:
        """The leader's. ``payload_nbytes``: of the largest batch of a step."""
        memory = SharedMemory.create("board", cls._control_nbytes(world_size) + payload_nbytes)
        return cls(memory, 0, world_size, timeout_s)

    @staticmethod
    def _control_nbytes(world_size: int) -> int:
        return 8 * (_GROUP_WORDS + _RANK_WORDS * world_size)

    def as_rank(self, rank: int) -> SharedBoard:
        """The same board as ``rank`` has it: for who writes here what that rank says elsewhere."""
        return SharedBoard(self._memory, rank, self.world_size, self.timeout_s)

    @property
    def path(self) -> str:
        return self._memory.path

    def close(self) -> None:
        self._memory.close()

    # ------------------------------------------------------------------ words

    @staticmethod
    def _index(rank: int, word: BoardWord) -> int:
        return _GROUP_WORDS + _RANK_WORDS * rank + word

    def count(self, rank: int, word: BoardWord) -> int:
        return self._words[_GROUP_WORDS + _RANK_WORDS * rank + word]

    def post(self, word: BoardWord, value: int) -> None:
        """Set one of our own words; what was written to shared memory before is seen with it."""
        self._words[_GROUP_WORDS + _RANK_WORDS * self.rank + word] = value

    def wait(self, rank: int, word: BoardWord, value: int) -> None:
        """Until ``rank`` has come to ``value``. Raises RankLost when the group is aborted meanwhile."""
        words, index = self._words, _GROUP_WORDS + _RANK_WORDS * rank + word
        for _ in range(_EAGER_LOOKS):
            if words[index] >= value:
                return
        began_s = time.monotonic()
        monitored_s = began_s
        while words[index] < value:
            now_s = time.monotonic()
            if now_s - began_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
            if now_s - monitored_s > _MONITOR_S:
                monitored_s = now_s
                self.check()

    def post_done(self, step: int) -> None:
        """This rank is done with ``step``; what it tells of it is posted already."""
        self.post(BoardWord.DONE, step)
        self._done[self.rank].wake()

    def wait_done(self, rank: int, step: int) -> None:
        """As ``wait``. Sleeps in the kernel at once where ``rank`` is far: looking again and again would keep
        the thread that hears of it from running."""
        if rank not in self.remote_ranks:
            self.wait(rank, BoardWord.DONE, step)
            return
        while (done := self.count(rank, BoardWord.DONE)) < step:
            self._done[rank].wait(done, _MONITOR_S)
            self.check()

    # ------------------------------------------------------------------ life and death

    def beat(self, age_ns: int = 0) -> None:
        """Tell the others that this process runs, or ran ``age_ns`` ago; from any thread, several times
        within the timeout."""
        self.post(BoardWord.HEARTBEAT_NS, time.monotonic_ns() - age_ns)

    def silent_s(self, rank: int) -> float:
        """For how long ``rank`` has not been heard of; 0 where it never was."""
        beat_ns = self.count(rank, BoardWord.HEARTBEAT_NS)
        return (time.monotonic_ns() - beat_ns) / 1e9 if beat_ns else 0.0

    def abort(self, rank: int) -> None:
        """End all waiting, now and later: ``rank`` is lost. Idempotent; the first one counts."""
        if not self._words[_ABORTED]:
            self._words[_ABORTED] = rank + 1
            self._step.wake()

    def check(self) -> None:
        """Raise RankLost where the group is aborted or its leader silent."""
        if aborted := self._words[_ABORTED]:
            raise RankLost(aborted - 1, "the group was aborted")
        if self.rank and (silent_s := self.silent_s(0)) > self.timeout_s:
            raise RankLost(0, f"the leader has been silent for {silent_s:.1f} s")

    # ------------------------------------------------------------------ steps

    def publish(self, step: int, nbytes: int) -> None:
        """The batch of ``step`` is in ``payload[:nbytes]``. The step before must be done on all ranks."""
        self._words[_NBYTES] = nbytes
        self._words[_STEP] = step
        self._step.wake()
        if self.on_publish is not None:
            self.on_publish(step, self.batch())

    @property
    def payload(self) -> npt.NDArray[np.uint8]:
        return self._payload

    def wait_step(self, seen: int) -> int:
        """Until there is a step after ``seen``; its number. Sleeps in the kernel when none comes soon."""
        words = self._words
        for _ in range(_EAGER_LOOKS):
            if words[_STEP] != seen:
                return words[_STEP]
        began_s = time.monotonic()
        while words[_STEP] == seen:
            if time.monotonic() - began_s < _YIELD_S:
                os.sched_yield()
            else:
                self._step.wait(seen, _MONITOR_S)
                self.check()
        return words[_STEP]

    def batch(self) -> npt.NDArray[np.uint8]:
        """The payload of the step published last, a view."""
        return self._payload[: self._words[_NBYTES]]
