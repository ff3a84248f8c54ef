"""A node's record in the index."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import orjson

from moonpool.kvstore.errors import EntryCorrupt
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.number_checks import (
    BY_FIELD,
    COUNT,
    FINITE,
    NBYTES_PER_S,
    UNIX_S,
    Range,
    integer,
    number,
)
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.security import posture, process

# The role of an external engine that is followed by its KV events.
EXTERNAL_ROLE = "external"
# In ``extra``: what the layout of another engine's blocks stands for, by name.
LAYOUT_FACTS = "layout_facts"
# The stages of a request, and the roles that requests are placed on: "both" serves both stages.
STAGES = ("prefill", "decode")
ROLES = (*STAGES, "both")
# In ``extra["join"]``, seconds by phase of the start. process: until the node began. weights: until they are
# in memory. warm_up: until the engine can step (pool, ranks, compiled kernels and graphs, cost profile).
# services: store and RPC server. registration: until the record is in the index.
JOIN_PHASES = ("process", "weights", "warm_up", "services", "registration")


def stages_of(role: str) -> tuple[str, ...]:
    """The stages that requests are placed on a node of this role for."""
    return STAGES if role == "both" else (role,) if role in STAGES else ()


class RecordCorrupt(EntryCorrupt):
    """A node's record cannot be read; ``str(error)`` names the field."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens still to compute
    num_blocks: int = 0
    free_blocks: int = 0  # free, or cached and evictable
    cached_blocks: int = 0  # of those, the cached ones
    num_context_tokens: int = 0  # of KV that the running sequences attend over


@dataclass(frozen=True, slots=True)
class TierFill:
    num_blocks: int = 0  # capacity
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node, or a replica of a node, in one epoch; epochs grow. ``replica`` names a replica's node."""

    node_id: str
    epoch: int
    role: str  # one of ROLES, "store", or EXTERNAL_ROLE
    host: str = ""
    pid: int = 0
    rpc_address: str = ""
    metrics_url: str = ""
    state: str = "ready"  # "starting", "ready", "unhealthy" (used last), "draining"
    reasons: tuple[str, ...] = ()  # why it is unhealthy, in sentences
    unix_s: float = 0.0  # when written, by its host's clock; 0: an older version
    model: str = ""
    layout: str = ""  # KVLayout.fingerprint, hex
    kv_address: bytes = b""  # protos.KvAddress, serialized
    load: NodeLoad = NodeLoad()
    tiers: dict[str, TierFill] = field(default_factory=dict)  # below the pool: "host", "ssd"
    profile: dict[str, float] = field(default_factory=dict)  # protos.Profile's coefficients by name
    links: dict[str, float] = field(default_factory=dict)  # recent bytes/s by node_id
    replica: Replica | None = None  # None: the whole node
    stages: tuple[str, ...] = ()  # that it can serve, whatever its role; empty: those of its role
    region: str = ""  # node.region; empty: none was given
    zone: str = ""
    extra: dict[str, Any] = field(default_factory=dict)  # fields of a newer version, kept as they are

    def can(self, stage: str) -> bool:
        """Whether the node answers the calls of this stage."""
        return stage in (self.stages or stages_of(self.role))

    def to_json(self) -> bytes:
        """The record as stored in Redis. ``epoch`` is text, because JSON readers lose 64-bit integers."""
        body = {**self.extra, **asdict(self), "epoch": str(self.epoch)}
        del body["extra"]
        body["kv_address"] = b64encode(self.kv_address).decode()
        return orjson.dumps(body)

    @classmethod
    def from_json(cls, data: bytes | str) -> NodeRecord:
        """Read a record of this version or a newer one.

        Raises ``RecordCorrupt``: a field is missing, of another type, or a number out of its range.
        """
        try:
            body = orjson.loads(data)
            known = {name: body.pop(name) for name in _FIELDS if name in body}
            for name in _TEXTS & known.keys():
                if not isinstance(known[name], str):
                    raise TypeError(f"{name} must be a text, got {known[name]!r}")
            known["epoch"] = integer("epoch", int(known["epoch"]), _EPOCH)
            known["pid"] = integer("pid", known.get("pid", 0), COUNT)
            known["unix_s"] = number("unix_s", known.get("unix_s", 0.0), UNIX_S)
            known["kv_address"] = b64decode(known.get("kv_address", ""), validate=True)
            load = known.get("load", {})
            known["load"] = NodeLoad(
                **{name: integer(f"load.{name}", load[name], COUNT) for name in _LOAD_FIELDS if name in load}
            )
            known["tiers"] = {
                name: TierFill(*(integer(f"tiers.{name}.{part}", fill[part], COUNT) for part in _FILL_FIELDS))
                for name, fill in known.get("tiers", {}).items()
            }
            known["stages"] = tuple(str(stage) for stage in known.get("stages", ()))
            known["reasons"] = tuple(str(reason) for reason in known.get("reasons", ()))
            if replica := known.get("replica"):
                known["replica"] = Replica.of(replica)
            known["profile"] = {
                name: number(f"profile.{name}", cost, BY_FIELD.get(f"moonpool.Profile.{name}", FINITE))
                for name, cost in known.get("profile", {}).items()
            }
            known["links"] = {
                name: number(f"links.{name}", rate, NBYTES_PER_S)
                for name, rate in known.get("links", {}).items()
            }
            return cls(**known, extra=body)
        except (ValueError, TypeError, KeyError, AttributeError, MoonpoolError) as error:
            raise RecordCorrupt(f"a node record cannot be read: {error!r} in {data[:200]!r}") from error

    def current(
        self, state: str, reasons: tuple[str, ...], readings: Mapping[str, Any], **facts: Any
    ) -> NodeRecord:
        """Return this record as of now: state, ``reasons`` and ``readings`` of the node's health, and the
        fields in ``facts``. Its ``extra`` is added to the record's own."""
        extra = {**self.extra, **facts.pop("extra", {}), "health": readings}
        extra["warnings"] = posture.warnings(process.current())
        return replace(self, **{"unix_s": time.time(), **facts}, state=state, reasons=reasons, extra=extra)


_FIELDS = tuple(f.name for f in fields(NodeRecord) if f.name != "extra")
_LOAD_FIELDS = tuple(f.name for f in fields(NodeLoad))
_FILL_FIELDS = tuple(f.name for f in fields(TierFill))
_TEXTS = frozenset(f.name for f in fields(NodeRecord) if f.type == "str")
_EPOCH = Range(0, (1 << 64) - 1)
