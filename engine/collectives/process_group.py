"""The torch.distributed process group of all ranks: rendezvous, Gloo's address, waits that can end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout

from moonpool.engine.collectives.board import SharedBoard
from moonpool.engine.errors import LinkBroken

# Gloo's waits have no time limit: a rank may compute for long, and the board knows which rank is lost.
_NO_TIMEOUT = timedelta(days=365)
_CHECK_S = 0.05
# Set by operators to choose the network between machines.
_INTERFACE = "GLOO_SOCKET_IFNAME"
_BACKEND = "gloo_here"


class ProcessGroup:
    """One rank's side of the group of all ranks.

    Over Gloo exchanges have no time limit; waits raise RankLost when the board says so. Over NCCL, where the
    GPU waits, NCCL's own limit is ``start_timeout_s`` until ``limit_steps`` and ``board.timeout_s`` from then
    on: in its first steps a rank compiles kernels while the others wait.
    """

    def __init__(
        self,
        backend: str,
        store: Store,
        board: SharedBoard,
        device: torch.device,
        *,
        address: str,
        start_timeout_s: float,
    ) -> None:
        """store: the same on all ranks, not used for anything else. address: of this machine for other ranks.

        Raises RankLost when the other ranks do not come within ``start_timeout_s``.
        """
        self.board = board
        self._start = timedelta(seconds=start_timeout_s)
        self._waiter: WorkWaiter | None = None
        self._groups: list[dist.ProcessGroup | None] = [None]  # that this rank is in; None: of all ranks
        hint = ""
        # When a rank is lost NCCL aborts its waiting kernels. Its default also ends this process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        if backend == "gloo":
            self._waiter = WorkWaiter(board.check)
            hint = (
                f"; this rank listens at {address}: if the machines reach each other by another network, set "
                f"{_INTERFACE} to its interface on each of them"
            )
        with raising_rank_lost(board.rank, hint):
            store.set(f"here/{board.rank}", "")
            store.wait([f"here/{rank}" for rank in range(board.world_size)], self._start)
            dist.init_process_group(
                gloo_backend(address) if backend == "gloo" else backend,
                store=store,
                rank=board.rank,
                world_size=board.world_size,
                timeout=self._start,
                device_id=device if device.type == "cuda" else None,
            )
            self._lift_limit(None)

    def _lift_limit(self, group: dist.ProcessGroup | None) -> None:
        if self._waiter is not None:
            _set_pg_timeout(_NO_TIMEOUT, group)

    def limit_steps(self) -> None:
        """Have NCCL end exchanges that take longer than ``board.timeout_s``. From any thread."""
        if self._waiter is None:
            for group in self._groups:
                _set_pg_timeout(timedelta(seconds=self.board.timeout_s), group)

    def groups(self, of: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        """Make a group of each of these rank lists, in the same order on all ranks. Return this rank's
        group. After an error this one is closed."""
        mine: dist.ProcessGroup | None = None
        try:
            with raising_rank_lost(self.board.rank):
                for ranks in of:
                    # torch requires every rank to make every group.
                    group = dist.new_group(list(ranks), timeout=self._start)
                    if self.board.rank in ranks:
                        self._lift_limit(group)
                        self._groups.append(group)
                        mine = group
        except BaseException:
            self.close(is_lost=True)  # or this process could join no group again
            raise
        assert mine is not None, "this rank is in no group"
        return mine

    def finish(self, rank: int, work: dist.Work | None) -> None:
        """Wait until ``work`` is done; on GPUs, order later launches after it. Raises RankLost, of
        ``rank`` if the cause is unknown."""
        if work is None:
            return
        began_ns = time.perf_counter_ns()
        with raising_rank_lost(rank):
            if self._waiter is None:
                work.wait()
            else:
                self._waiter.wait(work)
        # Moving the bytes is part of it: torch.distributed does not tell when the other rank was there.
        self.board.waited_ns += time.perf_counter_ns() - began_ns

    def close(self, is_lost: bool = False) -> None:
        """``is_lost``: a rank is lost, whatever the board says."""
        if self._waiter is not None:
            self._waiter.stop()
        elif is_lost or self.board.is_aborted:
            # An orderly end would wait for kernels that wait for the lost rank.
            _abort_process_group()
            return
        dist.destroy_process_group()


class WorkWaiter:
    """A thread that waits for Gloo, so that the caller can check for lost ranks meanwhile. Gloo itself never
    notices a dark machine or a stopped process."""

    def __init__(self, check: Callable[[], None]) -> None:
        """check: raises when further waiting is useless."""
        self._check = check
        self._works: SimpleQueue[dist.Work | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        Thread(target=self._run, name="exchanges", daemon=True).start()

    def wait(self, work: dist.Work) -> None:
        """Wait until ``work`` is done. Raises its error, or that of ``check``; then the waiter is
        unusable."""
        self._works.put(work)
        while True:
            try:
                error = self._ends.get(timeout=_CHECK_S)
            except Empty:
                self._check()
                continue
            if error is not None:
                raise error
            return

    def stop(self) -> None:
        """End the thread after its current work."""
        self._works.put(None)

    def _run(self) -> None:
        # Some works write to a step's tensors when waited for.
        with torch.inference_mode():
            while (work := self._works.get()) is not None:
                try:
                    work.wait()
                except Exception as error:
                    self._ends.put(error)
                else:
                    self._ends.put(None)


def gloo_backend(address: str) -> str:
    """Register Gloo listening at ``address`` as a torch.distributed backend. Return its name, valid until the
    next call.

    By default Gloo listens where the machine's own name resolves to: on many machines 127.0.1.1, which others
    cannot reach. ``GLOO_SOCKET_IFNAME`` has precedence.
    """
    dist.Backend.register_backend(_BACKEND, partial(_gloo_group, address), devices=["cpu"])
    return _BACKEND


def _gloo_group(address: str, store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub has another name
    options._timeout = timeout
    options._devices = [
        ProcessGroupGloo.create_default_device()
        if os.environ.get(_INTERFACE)
        else ProcessGroupGloo.create_device(hostname=address)
    ]
    return ProcessGroupGloo(store, rank, size, options)


@contextmanager
def raising_rank_lost(rank: int, hint: str = "") -> Iterator[None]:
    """Turn torch.distributed's errors into LinkBroken. ``rank``: the likely cause."""
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(rank, f"torch.distributed: {error}{hint}") from error
