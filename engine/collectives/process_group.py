"""The ranks of a group as torch.distributed knows them: how they meet, and how waiting for them ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from moonpool.engine.collectives.board import SharedBoard
from moonpool.engine.collectives.gloo import INTERFACE, gloo_backend
from moonpool.engine.collectives.work_waiter import WorkWaiter
from moonpool.engine.errors import LinkBroken

# Gloo ends no wait by itself: a rank that computes for long is not lost, and the board says who is.
_NO_TIMEOUT = timedelta(days=365)


class ProcessGroup:
    """One rank's side, of all ranks at once.

    What they exchange over Gloo has no time limit; waiting ends with RankLost when the board says so. Over
    NCCL, where waiting is the GPU's, ``timeout_s`` is NCCL's own.
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
        """store: the one all ranks were told of, used for nothing else. address: of this machine, where ranks
        on others reach it.

        Raises RankLost when the others do not come within ``start_timeout_s``.
        """
        self._board = board
        self._device = device
        self._start = timedelta(seconds=start_timeout_s)
        self._waiter: WorkWaiter | None = None
        hint = ""
        # Of a lost rank NCCL gives its waiting kernels up and no more: by default it ends this process too.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        if backend == "gloo":
            self._waiter = WorkWaiter(board.check)
            hint = (
                f"; this rank listens at {address}: where machines reach each other by another network, set "
                f"{INTERFACE} to its interface on each of them"
            )
        with raising_rank_lost(board.rank, hint):
            # What comes now has NCCL's time limit, and other ranks may still be importing.
            store.set(f"here/{board.rank}", "")
            store.wait([f"here/{rank}" for rank in range(board.world_size)], self._start)
            dist.init_process_group(
                gloo_backend(address) if backend == "gloo" else backend,
                store=store,
                rank=board.rank,
                world_size=board.world_size,
                timeout=self._limit,
                device_id=device if device.type == "cuda" else None,
            )
            self._lift_limit(None)

    @property
    def _limit(self) -> timedelta:
        """Of meeting over Gloo, of everything over NCCL."""
        return self._start if self._waiter is not None else timedelta(seconds=self._board.timeout_s)

    def _lift_limit(self, group: dist.ProcessGroup | None) -> None:
        if self._waiter is not None:
            _set_pg_timeout(_NO_TIMEOUT, group)

    def groups(self, of: Iterable[Sequence[int]]) -> dist.ProcessGroup:
        """Make a group of each of these runs of ranks, in the same order on all; ours of them."""
        mine: dist.ProcessGroup | None = None
        with raising_rank_lost(self._board.rank):
            for ranks in of:
                # Every rank makes every group, also those it is not in.
                group = dist.new_group(list(ranks), timeout=self._limit)
                if self._board.rank in ranks:
                    self._lift_limit(group)
                    mine = group
        assert mine is not None, "a rank of no group"
        return mine

    def finish(self, rank: int, work: dist.Work | None) -> None:
        """Until ``work`` is done: on GPUs, for what is launched from now on. Raises RankLost, of ``rank`` if
        nobody knows better."""
        if work is None:
            return
        with raising_rank_lost(rank):
            if self._waiter is None:
                work.wait()
            else:
                self._waiter.wait(work)

    def close(self) -> None:
        if self._waiter is not None:
            self._waiter.stop()
        dist.destroy_process_group()


@contextmanager
def raising_rank_lost(rank: int, hint: str = "") -> Iterator[None]:
    """torch.distributed's errors become RankLost; ``rank``: the one that may be to blame."""
    try:
        yield
    except RuntimeError as error:
        raise LinkBroken(rank, f"torch.distributed: {error}{hint}") from error
