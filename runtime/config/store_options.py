"""Options of the store: its tiers, its index, its events, and store nodes."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require, section

EVICTION_POLICIES = ("lru", "prefix")


@dataclass(frozen=True, slots=True)
class HostTierOptions(Section, name="store.host"):
    capacity_nbytes: int = option(
        256 << 20, "bytes", "host memory of one node for KV blocks, besides its pool", least=1
    )
    policy: str = option("prefix", "name", "eviction policy", choices=EVICTION_POLICIES)
    watermark: float = option(
        0.95,
        "fraction",
        "write-back: fill level from which blocks are written to disk, so that new blocks find space at once",
        above=0,
        most=1,
    )
    io_threads: int = option(1, "threads", "threads of a node that copy batches of more than 4 MiB", least=1)


@dataclass(frozen=True, slots=True)
class SsdTierOptions(Section, name="store.ssd"):
    path: str = option(
        "", "path", "directory for KV blocks on disk, with one subdirectory a node; empty: no SSD tier"
    )
    capacity_nbytes: int = option(8 << 30, "bytes", "disk space of one node for KV blocks", least=1)
    policy: str = option("prefix", "name", "eviction policy", choices=EVICTION_POLICIES)
    io_threads: int = option(
        3, "threads", "concurrent disk reads and writes of a node; each uses a thread, plus one", least=1
    )
    queue_nbytes: int = option(
        64 << 20,
        "bytes",
        "most bytes of blocks that are queued or being written; other blocks are not written",
        least=1,
    )
    deadline_s: float = option(
        2.0, "seconds", "longest a request waits for blocks from disk before it computes them", above=0
    )


@dataclass(frozen=True, slots=True)
class StoreOptions(Section, name="store"):
    lease_ttl_s: float = option(
        10.0, "seconds", "longest a peer may keep blocks without a renewal; it is told how long", above=0
    )
    write_policy: str = option(
        "write-back",
        "name",
        "when blocks go to disk: write-back (as host memory fills), write-through (as soon as they are "
        "stored) or selective (when used a second time)",
        choices=("write-back", "write-through", "selective"),
    )
    flush_s: float = option(
        3.0, "seconds", "longest time a stopping node writes blocks from memory to disk", least=0
    )
    host: HostTierOptions = section(HostTierOptions)
    ssd: SsdTierOptions = section(SsdTierOptions)


@dataclass(frozen=True, slots=True)
class IndexOptions(Section, name="index"):
    redis_url: str = option(
        "", "URL", "redis:// or unix:// URL of the index; empty: `moonpool up` starts its own Redis"
    )
    namespace: str = option(
        "moonpool", "text", "prefix of every Redis key; clusters that share a Redis need different ones"
    )
    lease_ttl_s: float = option(
        3.0, "seconds", "a node that is silent for this long is dropped from the index", least=0.5
    )
    publish_interval_s: float = option(
        0.02, "seconds", "how long block changes are collected before they are published", least=0
    )

    def _check(self) -> None:
        require(bool(self.namespace), "index.namespace", "a non-empty text", self.namespace)


@dataclass(frozen=True, slots=True)
class EventsOptions(Section, name="events"):
    zmq_endpoint: str = option(
        "",
        "address",
        "where a node publishes its blocks as vLLM's KV events, such as tcp://*:5557; empty: not published",
    )
    replay_endpoint: str = option(
        "", "address", "where subscribers request batches they missed; empty: no replay"
    )
    topic: str = option("", "text", "topic of the KV events, by convention kv@<pod>@<model>")
    interval_s: float = option(
        0.02, "seconds", "how long KV events are collected before they are sent", above=0
    )
    replay_batches: int = option(10_000, "batches", "sent batches that are kept for replay", least=0)

    def _check(self) -> None:
        require(
            bool(self.zmq_endpoint) or not self.replay_endpoint,
            "events.replay_endpoint",
            "empty while events.zmq_endpoint is empty",
            self.replay_endpoint,
        )


@dataclass(frozen=True, slots=True)
class StoreNodeOptions(Section, name="store_node"):
    object_nbytes: int = option(
        256 << 20, "bytes", "memory of a store node for objects; 0: none. KV blocks use store.host", least=0
    )
    object_ssd_nbytes: int = option(
        1 << 30, "bytes", "disk space of a store node for objects, where store.ssd.path is set", least=0
    )
    chunk_nbytes: int = option(
        1 << 20,
        "bytes",
        "size of the chunks that objects are stored in, the same on all store nodes; a multiple of 4096",
        least=4096,
    )
    tenant_nbytes: int = option(
        0,
        "bytes",
        "most space of a store node that one tenant's objects use; beyond it its own are evicted; 0: all",
        least=0,
    )

    def _check(self) -> None:
        whole = self.chunk_nbytes % 4096 == 0
        require(whole, "store_node.chunk_nbytes", "a multiple of 4096", self.chunk_nbytes)
        require(
            self.object_nbytes == 0 or self.object_nbytes >= self.chunk_nbytes,
            "store_node.object_nbytes",
            f"0, or at least one chunk (store_node.chunk_nbytes, {self.chunk_nbytes})",
            self.object_nbytes,
        )
