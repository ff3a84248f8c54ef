"""What a node says of itself in the index."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import orjson

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.replicas.identity import Replica

# Of an engine that is not ours and is followed by its KV events.
EXTERNAL_ROLE = "external"
# Roles that requests are placed on.
ROLES = ("prefill", "decode")


class RecordCorrupt(StoreError):
    """A node's record in the index cannot be read; ``str(error)`` says which field is wrong."""


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy a node is; carried by every heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0  # prompt tokens still to compute
    num_blocks: int = 0
    free_blocks: int = 0  # free, or cached and evictable
    cached_blocks: int = 0  # of those, the ones that hold something


@dataclass(frozen=True, slots=True)
class TierFill:
    """How full a tier below the pool is."""

    num_blocks: int = 0  # there is room for
    num_held: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node, or one replica of a node, in one life (``epoch``), which grows from each life to the next.

    A replica holds blocks and takes requests as any node does; ``replica`` says whose it is.
    """

    node_id: str
    epoch: int
    role: str  # "prefill", "decode", "store", or EXTERNAL_ROLE
    host: str = ""
    pid: int = 0
    rpc_address: str = ""
    metrics_url: str = ""
    state: str = "ready"  # "starting", "ready", "unhealthy" (to be used last), "draining"
    reasons: tuple[str, ...] = ()  # why it is unhealthy, in sentences
    unix_s: float = 0.0  # when this was written, by the clock of the node's host; 0: an older version
    model: str = ""
    layout: str = ""  # KVLayout.fingerprint, hex
    kv_address: bytes = b""  # protos.KvAddress, serialized
    load: NodeLoad = NodeLoad()
    tiers: dict[str, TierFill] = field(default_factory=dict)  # below the pool: "host", "ssd"
    profile: dict[str, float] = field(default_factory=dict)  # protos.Profile's coefficients by name
    links: dict[str, float] = field(default_factory=dict)  # bytes/s it reached lately, by node_id
    replica: Replica | None = None  # None: it is the whole node
    extra: dict[str, Any] = field(default_factory=dict)  # fields a newer version wrote; kept as they are

    def to_json(self) -> bytes:
        """The record as Redis keeps it. ``epoch`` goes as text: JSON readers lose 64-bit integers."""
        body = {**self.extra, **asdict(self), "epoch": str(self.epoch)}
        del body["extra"]
        body["kv_address"] = b64encode(self.kv_address).decode()
        return orjson.dumps(body)

    @classmethod
    def from_json(cls, data: bytes | str) -> NodeRecord:
        """Read a record of this version or a newer one. Raises ``RecordCorrupt``."""
        try:
            body = orjson.loads(data)
            known = {name: body.pop(name) for name in _FIELDS if name in body}
            known["epoch"] = int(known["epoch"])
            known["kv_address"] = b64decode(known.get("kv_address", ""), validate=True)
            load = known.get("load", {})
            known["load"] = NodeLoad(**{name: int(load[name]) for name in _LOAD_FIELDS if name in load})
            known["tiers"] = {
                name: TierFill(int(fill["num_blocks"]), int(fill["num_held"]))
                for name, fill in known.get("tiers", {}).items()
            }
            known["reasons"] = tuple(str(reason) for reason in known.get("reasons", ()))
            if replica := known.get("replica"):
                known["replica"] = Replica.of(replica)
            known["links"] = {name: float(rate) for name, rate in known.get("links", {}).items()}
            return cls(**known, extra=body)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordCorrupt(f"a node record cannot be read: {error!r} in {data[:200]!r}") from error

    def current(
        self, state: str, reasons: tuple[str, ...], readings: Mapping[str, Any], **facts: Any
    ) -> NodeRecord:
        """Return this record as of now: state, ``reasons`` and ``readings`` of the node's health, and the
        fields in ``facts``. Its ``extra`` is added to the record's own."""
        extra = {**self.extra, **facts.pop("extra", {}), "health": readings}
        return replace(self, **{"unix_s": time.time(), **facts}, state=state, reasons=reasons, extra=extra)


_FIELDS = tuple(f.name for f in fields(NodeRecord) if f.name != "extra")
_LOAD_FIELDS = tuple(f.name for f in fields(NodeLoad))
