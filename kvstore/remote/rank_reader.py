"""A rank's reads of its shard of blocks from the ranks of another node."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.transfer import AgentDescriptor, JointRead, Region, Spans, TransferAgent


@dataclass(frozen=True, slots=True)
class RankRead:
    """Blocks of one source into blocks of a rank's pool, the same runs of each.

    source_begins, target_begins: bytes, one for each block; runs: (source, target, nbytes), from there.
    """

    agent: bytes  # the source's AgentDescriptor, packed
    region: int
    source_begins: list[int]
    target_begins: list[int]
    runs: list[tuple[int, int, int]]
    deadline_s: float

    def pack(self) -> dict[str, object]:
        return {**asdict(self), "agent": b64encode(self.agent).decode()}

    @classmethod
    def unpack(cls, words: dict[str, object]) -> RankRead:
        agent = words["agent"]
        assert isinstance(agent, str)
        return cls(**{**words, "agent": b64decode(agent)})  # type: ignore[arg-type]

    def spans(self, local: int) -> tuple[Spans, Spans]:
        """(spans of region ``local``, spans of the source), run by run of each block."""
        runs = np.array(self.runs, np.int64).reshape(-1, 3)
        nbytes = np.tile(runs[:, 2], len(self.source_begins)).astype(np.uint64)

        def column(region: int, begins: list[int], offsets: npt.NDArray[np.int64]) -> Spans:
            at = (np.array(begins, np.int64)[:, None] + offsets).reshape(-1)
            return Spans(np.full(len(nbytes), region, np.uint32), at.astype(np.uint64), nbytes)

        target = column(local, self.target_begins, runs[:, 1])
        return target, column(self.region, self.source_begins, runs[:, 0])


@lru_cache(maxsize=1024)
def _descriptor(packed: bytes) -> AgentDescriptor:
    """Cached, because the same sources are read again and again."""
    return AgentDescriptor.unpack(packed)


class RankReader(Protocol):
    async def read(self, request: RankRead) -> str:
        """Returns the transport. Raises ``TransferError``: the target blocks are undefined, as after a
        cancellation."""
        ...


class AgentReader:
    """Reads with an agent of this process into one of its regions."""

    def __init__(self, agent: TransferAgent, region: Region) -> None:
        self._agent = agent
        self.region = region

    async def read(self, request: RankRead, joint: JointRead | None = None) -> str:
        """``joint``: of several reads that fill blocks together."""
        peer = await self._agent.connect(_descriptor(request.agent))
        local, remote = request.spans(self.region.id)
        return (await peer.read(local, remote, deadline_s=request.deadline_s, joint=joint)).transport

    def joint(
        self, begins: Sequence[int], block_nbytes: int, checksums: Sequence[int], num_reads: int
    ) -> JointRead:
        """For reads that together fill whole blocks of the region at these offsets."""
        return JointRead(self.region, begins, block_nbytes, checksums, num_reads)
