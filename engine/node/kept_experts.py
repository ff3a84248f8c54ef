"""The placement of experts that was applied to a running node, kept in Redis for its next life."""

from __future__ import annotations

import json
import logging

from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.kvstore.errors import EntryRefused, IndexUnavailable
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.errors import ConfigError

log = logging.getLogger(__name__)

_KIND = b"x"


class KeptExperts:
    """Of one node over its lives in this process, and in later ones of the same id."""

    def __init__(self, node_id: str, *, is_named: bool) -> None:
        """``is_named``: a later process of the node will have the same id."""
        self._node_id = node_id
        self._is_named = is_named
        self._of: tuple[str, str] = ("", "")  # model and configured plan of this life
        self._kept: bytes | None = None  # by this process

    async def load(self, index: KVIndex, setup: EngineSetup) -> ExpertPlacement | None:
        """Return the placement to begin this life with; None: the configured one. One that does not fit the
        model and plan of ``setup`` any more is left out, and the log says why."""
        self._of = setup.config.fingerprint().hex(), str(setup.plan)
        try:
            body = self._kept or await self._read(index)
            return None if body is None else self._fitting(body, setup)
        except (IndexUnavailable, EntryRefused, ConfigError) as error:
            log.warning("the node begins without the placement of experts that was applied to it: %s", error)
            return None

    async def save(self, index: KVIndex, placement: ExpertPlacement) -> str:
        """Keep ``placement`` for the next lives. Return why a later process will begin without it; empty: it
        begins with it."""
        model, plan = self._of
        self._kept = json.dumps({"model": model, "plan": plan, "placement": placement.to_json()}).encode()
        if not self._is_named:
            return "node.id is not set, so another process will have another id"
        sealed = index.seals.seal(_KIND, self._place(index), self._kept)
        try:
            await index.command("HSET", _key(index), self._node_id, sealed)
        except IndexUnavailable as error:
            return str(error)
        return ""

    async def _read(self, index: KVIndex) -> bytes | None:
        """Raises IndexUnavailable or EntryRefused."""
        if not self._is_named:
            return None
        sealed = await index.command("HGET", _key(index), self._node_id)
        return None if sealed is None else index.seals.open(_KIND, self._place(index), sealed).body

    def _fitting(self, body: bytes, setup: EngineSetup) -> ExpertPlacement:
        """Raises ConfigError."""
        found = json.loads(body)  # sealed, so one of us wrote it
        for what, then, now in zip(("model", "plan"), (found["model"], found["plan"]), self._of, strict=True):
            if then != now:
                raise ConfigError(f"it is for {what} {then}, and this node has {now}")
        placement = ExpertPlacement.from_json(found["placement"], "what was kept")
        moe = setup.config.moe
        placement.check(setup.config.num_layers, moe.num_experts if moe else 0, setup.plan.ep)
        log.info("the node begins with the placement of experts %s, applied before", placement.digest)
        return placement

    def _place(self, index: KVIndex) -> bytes:
        return f"{_key(index)}/{self._node_id}".encode()


def _key(index: KVIndex) -> str:
    return f"{{{index.namespace}}}:experts"
