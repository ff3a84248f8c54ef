"""Hot prefixes for other clusters that have this one's key, and from them: offered by one, read by another.

A router of cells carries an offer: it can neither make nor change one.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import orjson

from moonpool.conductor.admission.tenants import Regions
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.replication.copier import Replicator
from moonpool.conductor.replication.copy_plan import Copy, Shape, next_part, pays
from moonpool.conductor.replication.heat import HotChain
from moonpool.kvstore.blocks.keys import BlockKey, pack, unpack
from moonpool.kvstore.errors import EntryRefused
from moonpool.kvstore.index.redis.seal import Seals
from moonpool.protos import node_pb2

_MOST: Final = 256  # of a conductor that goes on serving
_MOST_KNOWN: Final = 1024
_KIND, _PLACE = b"P", b"a hot prefix for another cluster"
_FRESH_S: Final = 60.0
# Of one call. A router makes one every few seconds, so copies from elsewhere take a part of the bandwidth.
_TAKE_S: Final = 5.0
_TAKE_BANDWIDTH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A prefix that another cluster may read. ``identity``: model and layout of its blocks."""

    identity: tuple[str, str]
    keys: tuple[BlockKey, ...]
    source: node_pb2.KvAddress
    region: str  # of the source
    regions: Regions  # that its tenant is confined to

    def sealed(self, seals: Seals, now_unix_s: float) -> str:
        """As text, under the cluster's key."""
        body = {
            "identity": self.identity,
            "keys": b64encode(pack(self.keys)).decode(),
            "source": b64encode(self.source.SerializeToString()).decode(),
            "region": self.region,
            "regions": sorted(self.regions),
        }
        return b64encode(seals.seal(_KIND, _PLACE, orjson.dumps(body), number=int(now_unix_s))).decode()

    @classmethod
    def opened(cls, text: str, seals: Seals, now_unix_s: float) -> Offer:
        """Raises ``EntryRefused``: made without the cluster's key, or too long ago. ``ValueError``: no text
        of an offer."""
        sealed = seals.open(_KIND, _PLACE, b64decode(text, validate=True))
        if abs(now_unix_s - sealed.number) > _FRESH_S:
            raise EntryRefused("expired", f"a prefix was offered {now_unix_s - sealed.number:.0f} s ago")
        body = orjson.loads(sealed.body)
        model, layout = body["identity"]
        source = node_pb2.KvAddress.FromString(b64decode(body["source"]))
        keys = tuple(unpack(b64decode(body["keys"])))
        return cls((model, layout), keys, source, body["region"], frozenset(body["regions"]))


class Offers:
    """Makes the offers of one model's conductor, and takes those of others."""

    def __init__(
        self,
        registry: NodeRegistry,
        cost_model: CostModel,
        replicator: Replicator,
        *,
        nbytes_per_s: float,
        block_size: int,
        clock: Callable[[], float],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``nbytes_per_s``: for all copies of this conductor; 0: it neither makes nor takes offers."""
        self._registry = registry
        self._links = cost_model.links
        self._replicator = replicator
        self._nbytes_per_s = nbytes_per_s
        self._block_size = block_size
        self._clock = clock
        self._unix_clock = unix_clock
        self._seals = Seals()
        self._turn = asyncio.Lock()

    def made(self, *, moves: bool) -> list[dict[str, Any]]:
        """The hottest prefixes, the hottest first, as plain JSON types: ``sealed`` is the offer, and the rest
        tells a router where it may go. ``moves``: requests go elsewhere now, so that all prefixes are offered
        and not only those that are used again and again."""
        return [
            {
                "id": chain.keys[-1].hex(),
                "digests": chain.digests,
                "regions": sorted(offer.regions),
                "sealed": offer.sealed(self._seals, self._unix_clock()),
            }
            for chain, offer in self._offered(moves=moves)
        ]

    def _offered(self, *, moves: bool) -> Iterator[tuple[HotChain, Offer]]:
        identity = self._registry.identity
        if identity is None or not self._nbytes_per_s:
            return
        most = _MOST_KNOWN if moves else _MOST
        for regions, chain in self._replicator.hottest(most, used_again=not moves):
            held = self._registry.holders(chain.keys, regions)
            have = sorted(name for name, blocks in held.items() if blocks >= len(chain.keys))
            member = self._registry.members.get(have[0]) if have else None
            if member is not None and chain.digests and (source := member.kv_address) is not None:
                yield chain, Offer(identity, chain.keys, source, member.record.region, regions)

    async def take(self, texts: Sequence[str]) -> dict[str, int | list[int]]:
        """Read the prefixes that no node here has and that are worth it, in their order.

        Ends within some seconds. Returns the positions of those that are here now (``held``), and the number
        of those that were read (``copied``). Raises ``EntryRefused``, ``ValueError``: see ``Offer.opened``;
        nothing was read.
        """
        offers = [Offer.opened(text, self._seals, self._unix_clock()) for text in texts]
        held, copied = list[int](), 0
        async with self._turn:
            left_nbytes = self._nbytes_per_s * _TAKE_BANDWIDTH_S
            ends_s = self._clock() + _TAKE_S
            for position, offer in enumerate(offers):
                if self._has(offer):
                    held.append(position)
                    continue
                with self._located(offer) as source:
                    copy = self._planned(offer, source, left_nbytes)
                    if copy is None or self._clock() >= ends_s:
                        continue
                    left_nbytes -= copy.nbytes
                    # It is the only copy in this cluster, and so none to evict before others.
                    if await self._replicator.read(copy, offer.source, surplus=False):
                        copied += 1
                        if len(copy.keys) == len(offer.keys):
                            held.append(position)
        return {"held": held, "copied": copied}

    def _has(self, offer: Offer) -> bool:
        held = self._registry.holders(offer.keys, offer.regions)
        return any(blocks >= len(offer.keys) for blocks in held.values())

    @contextmanager
    def _located(self, offer: Offer) -> Iterator[str]:
        """The name of an offer's source among the links, which know its region meanwhile."""
        # Nodes of other clusters may have the names of ours.
        source = f"{offer.source.node_id} at {offer.source.rpc_address}"
        self._links.place(source, offer.region)
        try:
            yield source
        finally:
            self._links.place(source, "")

    def _planned(self, offer: Offer, source: str, left_nbytes: float) -> Copy | None:
        """The next part of a prefix that a node here should read from ``source``; None: none."""
        registry, layout = self._registry, self._registry.layout
        if layout is None or offer.identity != registry.identity:
            return None
        held = registry.holders(offer.keys, offer.regions)
        fleet = registry.fleet("prefill", offer.regions)
        most_of_it = max(fleet, key=lambda view: (held.get(view.node_id, 0), -view.num_placed), default=None)
        if most_of_it is None:
            return None
        shape = Shape(self._block_size, layout.block_nbytes)
        copy = next_part(offer.keys, source, most_of_it.node_id, held, shape, left_nbytes)
        worth_it = copy is not None and pays(copy, most_of_it, self._links, shape, self._clock())
        return copy if worth_it else None
