"""Every option of Moonpool: one default, one unit, one check, one sentence.

``moonpool.runtime.config.loading`` maps a TOML file and ``--set section.key=value`` onto these frozen
dataclasses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ConfigError


def option(default: Any, unit: str, meaning: str, *, secret: bool = False) -> Any:
    """A dataclass field with what ``moonpool config --explain`` prints beside its default. ``secret``: nobody
    is shown its value.
    """
    return field(default=default, metadata={"unit": unit, "meaning": meaning, "secret": secret})


def _section(cls: type) -> Any:
    return field(default_factory=cls)


def _require(condition: bool, key: str, must: str, value: object) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {must}, got {value!r}", key)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    path: str = option(
        "", "path", "Hugging Face checkpoint directory; empty: the model that ships with Moonpool"
    )
    name: str = option(
        "", "text", "name in the API; empty: the directory's, or moonpool-demo for the one that ships"
    )
    dtype: str = option(
        "auto", "name", "auto, float32, bfloat16 or float16; auto: the fastest measured for the device"
    )
    device: str = option("auto", "name", "auto, cpu, cuda or cuda:0, cuda:1 …; auto: the first GPU, if any")
    max_model_len: int = option(0, "tokens", "longest prompt plus output; 0: the checkpoint's own limit")

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "model.dtype",
            "auto, float32, bfloat16 or float16",
            self.dtype,
        )
        known = self.device in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:\d+", self.device)
        _require(bool(known), "model.device", "auto, cpu, cuda or cuda:NUMBER", self.device)
        _require(self.max_model_len >= 0, "model.max_model_len", "0 or more", self.max_model_len)

    @property
    def directory(self) -> Path:
        """The checkpoint directory: ``path``, or the model that ships. It need not exist."""
        return Path(self.path) if self.path else Path(__file__).parents[2] / "demo" / "model"

    @property
    def served_name(self) -> str:
        """What the API calls the model."""
        return self.name or (self.directory.resolve().name if self.path else "moonpool-demo")


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    tp: int = option(1, "ranks", "tensor parallel: ranks that share every layer of a node's model")
    pp: int = option(1, "stages", "pipeline parallel: runs of layers a node's model is cut into")
    ep: int = option(1, "ranks", "expert parallel: tp's ranks a mixture's experts are dealt out to")
    expert_plan_path: str = option(
        "", "path", "expert parallel: which ranks hold which experts, as `moonpool experts` wrote it"
    )
    all_to_all_tokens: int = option(
        0,
        "tokens",
        "expert parallel: steps of as many tokens send them to their experts' ranks (all-to-all), in shorter "
        "ones all ranks see all tokens; 0: by a measured rule",
    )
    dp: int = option(
        1,
        "replicas",
        "data parallel: replicas behind one node, each with ranks, GPUs, a pool, tiers and a port "
        "(from node.port on) of its own",
    )
    cp: int = option(1, "ranks", "context parallel: ranks that share the tokens of one long prompt")
    hosts: int = option(
        1,
        "machines",
        "that a node's ranks are dealt out to, whole stages (pp) to each; the others run `moonpool ranks`",
    )
    listen: str = option(
        "",
        "host:port",
        "with hosts: where `moonpool ranks` of the other machines reach this node; replica r takes port + r",
    )
    link: str = option(
        "auto",
        "name",
        "how ranks exchange tensors: shm (memory they share), gloo, nccl, shm+gloo (memory on a machine, "
        "Gloo between machines); auto: nccl on GPUs, shm+gloo with several hosts, else shm",
    )
    timeout_s: float = option(
        5.0, "seconds", "a rank silent for this long while others wait for it is lost; so is a replica"
    )
    start_timeout_s: float = option(120.0, "seconds", "longest the ranks may take to start and load")
    piece_tokens: int = option(
        128, "tokens", "pipeline: most prompt tokens that go through a stage at once, the rest follows behind"
    )
    share_tokens: int = option(
        8, "tokens", "context parallel: fewer at once are not shared out, but computed by every rank"
    )

    def __post_init__(self) -> None:
        for name in (
            "tp",
            "pp",
            "ep",
            "dp",
            "cp",
            "hosts",
            "timeout_s",
            "start_timeout_s",
            "piece_tokens",
            "share_tokens",
        ):
            _require(getattr(self, name) > 0, f"engine.parallel.{name}", "positive", getattr(self, name))
        least = self.all_to_all_tokens
        _require(least >= 0, "engine.parallel.all_to_all_tokens", "0 or more", least)
        links = ("auto", "shm", "gloo", "nccl", "shm+gloo")
        _require(self.link in links, "engine.parallel.link", f"one of {', '.join(links)}", self.link)

        valid = [n for n in range(1, self.pp + 1) if self.pp % n == 0]
        _require(
            self.hosts in valid,
            "engine.parallel.hosts",
            f"one of {', '.join(map(str, valid))}, so that each has as many of the {self.pp} stages "
            "(engine.parallel.pp)",
            self.hosts,
        )
        _, _, port = self.listen.rpartition(":")
        _require(
            (self.hosts == 1 and not self.listen) or port.isdigit(),
            "engine.parallel.listen",
            "an address of this machine and a port where the others reach it, such as 10.0.0.1:7400",
            self.listen,
        )

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def ranks_per_host(self) -> int:
        """Rank r is on machine ``r // ranks_per_host``; the leader's is 0."""
        return self.world_size // self.hosts


@dataclass(frozen=True, slots=True)
class EngineOptions:
    block_size: int = option(16, "tokens", "tokens a KV block")
    kv_dtype: str = option(
        "auto",
        "name",
        "of the pages: auto (that of the computation) or fp8_e4m3, with the checkpoint's k_scale and v_scale",
    )
    pool_nbytes: int = option(
        0,
        "bytes",
        "memory for a node's paged KV pool; 0: 256 MiB, on a GPU what engine.gpu_memory leaves",
    )
    gpu_memory: float = option(
        0.9, "fraction", "on a GPU: how much of its memory one node may take in all, weights included"
    )
    decode_graphs: bool = option(
        True, "flag", "on a GPU: record decode steps at the start, once a batch size, and replay them"
    )
    max_batch_size: int = option(64, "sequences", "most sequences in one step")
    max_batch_tokens: int = option(
        512, "tokens", "most tokens in one step; longer prompts are computed in chunks"
    )
    threads: int = option(1, "threads", "compute threads of a node process")
    parallel: ParallelOptions = _section(ParallelOptions)

    def __post_init__(self) -> None:
        _require(
            self.block_size in (8, 16, 32, 64, 128, 256, 512),
            "engine.block_size",
            "a power of two from 8 to 512",
            self.block_size,
        )
        _require(self.kv_dtype in ("auto", "fp8_e4m3"), "engine.kv_dtype", "auto or fp8_e4m3", self.kv_dtype)
        for name in ("max_batch_size", "max_batch_tokens", "threads"):
            _require(getattr(self, name) > 0, f"engine.{name}", "positive", getattr(self, name))
        _require(self.pool_nbytes >= 0, "engine.pool_nbytes", "0 or more", self.pool_nbytes)
        _require(0 < self.gpu_memory <= 1, "engine.gpu_memory", "above 0, at most 1", self.gpu_memory)
        # Tokens are shared out in whole blocks.
        most = max(1, self.max_batch_tokens // self.block_size)
        must = f"at most {most}, the blocks of a step (engine.max_batch_tokens / engine.block_size)"
        _require(self.parallel.cp <= most, "engine.parallel.cp", must, self.parallel.cp)

    @property
    def host_pool_nbytes(self) -> int:
        """The pool of a node that computes on CPUs."""
        return self.pool_nbytes or 256 << 20


EVICTION_POLICIES = ("lru", "prefix")


@dataclass(frozen=True, slots=True)
class HostTierOptions:
    capacity_nbytes: int = option(256 << 20, "bytes", "host memory of one node for KV blocks beside its pool")
    policy: str = option("prefix", "name", "eviction policy: lru or prefix")
    watermark: float = option(
        0.95, "fraction", "write-back: blocks go to disk from this filling on, so that there is room at once"
    )

    io_threads: int = option(1, "threads", "threads of a node that copy batches of more than 4 MiB")

    def __post_init__(self) -> None:
        for name in ("capacity_nbytes", "io_threads"):
            _require(getattr(self, name) > 0, f"store.host.{name}", "positive", getattr(self, name))
        _require_policy("store.host.policy", self.policy)
        _require(0 < self.watermark <= 1, "store.host.watermark", "above 0, at most 1", self.watermark)


@dataclass(frozen=True, slots=True)
class SsdTierOptions:
    path: str = option(
        "", "path", "directory for KV blocks on disk, one folder a node in it; empty: no SSD tier"
    )
    capacity_nbytes: int = option(8 << 30, "bytes", "disk space of one node for KV blocks")
    policy: str = option("prefix", "name", "eviction policy: lru or prefix")
    io_threads: int = option(
        3, "threads", "reads and writes of a node that are in the disk at a time: a thread each, and one more"
    )
    queue_nbytes: int = option(
        32 << 20, "bytes", "blocks that may wait to be written; what comes beyond is not written, and counted"
    )
    deadline_s: float = option(
        2.0, "seconds", "longest a request waits for blocks from disk; then it computes them"
    )

    def __post_init__(self) -> None:
        for name in ("capacity_nbytes", "io_threads", "queue_nbytes", "deadline_s"):
            _require(getattr(self, name) > 0, f"store.ssd.{name}", "positive", getattr(self, name))
        _require_policy("store.ssd.policy", self.policy)


def _require_policy(key: str, name: str) -> None:
    _require(name in EVICTION_POLICIES, key, f"one of {', '.join(EVICTION_POLICIES)}", name)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    lease_ttl_s: float = option(10.0, "seconds", "longest a peer may keep blocks pinned without asking again")
    write_policy: str = option(
        "write-back",
        "name",
        "when blocks go to disk: write-back (as host memory fills), write-through (as soon as they are "
        "stored) or selective (when used a second time)",
    )
    flush_s: float = option(
        3.0, "seconds", "longest a node that ends writes to disk what only its memory holds"
    )
    host: HostTierOptions = _section(HostTierOptions)
    ssd: SsdTierOptions = _section(SsdTierOptions)

    def __post_init__(self) -> None:
        _require(self.lease_ttl_s > 0, "store.lease_ttl_s", "positive", self.lease_ttl_s)
        _require(self.flush_s >= 0, "store.flush_s", "0 or more", self.flush_s)
        policies = ("write-back", "write-through", "selective")
        _require(
            self.write_policy in policies,
            "store.write_policy",
            f"one of {', '.join(policies)}",
            self.write_policy,
        )


@dataclass(frozen=True, slots=True)
class TcpOptions:
    streams: int = option(2, "connections", "parallel connections to each address of a peer")
    slice_nbytes: int = option(4 << 20, "bytes", "most bytes handed to the kernel in one call")
    host: str = option("127.0.0.1", "address", "address to listen on and to announce")
    rails: tuple[str, ...] = option(
        (), "addresses", "of further interfaces: batches are spread over them and host, as fast as each is"
    )

    def __post_init__(self) -> None:
        _require(len(self.rails) <= 16, "transfer.tcp.rails", "at most 16 addresses", len(self.rails))
        _require(1 <= self.streams <= 64, "transfer.tcp.streams", "from 1 to 64", self.streams)
        _require(self.slice_nbytes >= 4096, "transfer.tcp.slice_nbytes", "4096 or more", self.slice_nbytes)


@dataclass(frozen=True, slots=True)
class TlsOptions:
    cert: str = option("", "path", "this node's certificate (PEM); empty: no TLS between transfer agents")
    key: str = option("", "path", "its private key (PEM)")
    ca: str = option("", "path", "the authority that signed the certificates of all nodes (PEM)")

    def __post_init__(self) -> None:
        given = [bool(path) for path in (self.cert, self.key, self.ca)]
        _require(all(given) or not any(given), "transfer.tls", "cert, key and ca together, or none", self)


@dataclass(frozen=True, slots=True)
class TransferOptions:
    transports: tuple[str, ...] = option(
        ("local", "cuda-ipc", "shm", "tcp"), "names", "transports to offer, best first"
    )
    checksum: bool = option(True, "flag", "verify every block's checksum where it arrives")
    deadline_s: float = option(10.0, "seconds", "longest a batch may take")
    secret: str = option("", "text", "shared secret a peer must prove to know; empty: none", secret=True)
    tcp: TcpOptions = _section(TcpOptions)
    tls: TlsOptions = _section(TlsOptions)

    def __post_init__(self) -> None:
        plain = bool(self.tls.cert) and "ucx" in self.transports
        _require(
            not plain,
            "transfer.transports",
            "without ucx where transfer.tls is set: UCX does not encrypt",
            "ucx",
        )
        known = ("local", "cuda-ipc", "shm", "tcp", "ucx")
        for name in self.transports:
            _require(name in known, "transfer.transports", f"names out of {', '.join(known)}", name)
        _require(self.deadline_s > 0, "transfer.deadline_s", "positive", self.deadline_s)


@dataclass(frozen=True, slots=True)
class IndexOptions:
    redis_url: str = option(
        "", "URL", "redis:// or unix:// of the index; empty: `moonpool up` starts its own"
    )
    namespace: str = option(
        "moonpool", "text", "prefix of every Redis key; clusters on one Redis need different ones"
    )
    lease_ttl_s: float = option(3.0, "seconds", "a node silent for this long is dropped from the index")
    publish_interval_s: float = option(
        0.02, "seconds", "how long block changes are gathered before they are published"
    )

    def __post_init__(self) -> None:
        _require(bool(self.namespace), "index.namespace", "a non-empty text", self.namespace)
        _require(self.lease_ttl_s >= 0.5, "index.lease_ttl_s", "0.5 or more", self.lease_ttl_s)
        _require(
            self.publish_interval_s >= 0, "index.publish_interval_s", "0 or more", self.publish_interval_s
        )


@dataclass(frozen=True, slots=True)
class EventsOptions:
    zmq_endpoint: str = option(
        "",
        "address",
        "where a node publishes its blocks as vLLM's KV events, such as tcp://*:5557; empty: not",
    )
    replay_endpoint: str = option("", "address", "where subscribers ask for batches they missed; empty: not")
    topic: str = option("", "text", "topic of the KV events, by convention kv@<pod>@<model>")
    interval_s: float = option(0.02, "seconds", "how long KV events are gathered before they are sent")
    replay_batches: int = option(10_000, "batches", "sent batches that are kept for the replay")

    def __post_init__(self) -> None:
        _require(self.interval_s > 0, "events.interval_s", "positive", self.interval_s)
        _require(self.replay_batches >= 0, "events.replay_batches", "0 or more", self.replay_batches)
        _require(
            bool(self.zmq_endpoint) or not self.replay_endpoint,
            "events.replay_endpoint",
            "empty while events.zmq_endpoint is",
            self.replay_endpoint,
        )


@dataclass(frozen=True, slots=True)
class NodeOptions:
    id: str = option("", "text", "name of this node; empty: its role, host and port")
    host: str = option("127.0.0.1", "address", "address to listen on and to announce to the cluster")
    port: int = option(0, "port", "gRPC port; 0: a free one")
    metrics_port: int = option(0, "port", "HTTP port of /metrics; 0: a free one")
    orphan_s: float = option(
        5.0, "seconds", "how long a decode node keeps the requests of a conductor that went away"
    )
    drain_s: float = option(30.0, "seconds", "how long SIGTERM waits for running requests")

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            _require(0 <= getattr(self, name) < 65536, f"node.{name}", "from 0 to 65535", getattr(self, name))


@dataclass(frozen=True, slots=True)
class StoreNodeOptions:
    object_nbytes: int = option(
        256 << 20, "bytes", "memory a store node lends to objects; 0: none. KV blocks get store.host"
    )
    object_ssd_nbytes: int = option(
        1 << 30, "bytes", "disk a store node lends to objects, where store.ssd.path is set"
    )
    chunk_nbytes: int = option(
        1 << 20,
        "bytes",
        "objects take whole chunks of this size, the same on all store nodes; smaller for small objects",
    )
    tenant_nbytes: int = option(
        0, "bytes", "what one tenant's objects may take of a store node, by evicting its own; 0: all there is"
    )

    def __post_init__(self) -> None:
        for name in ("object_nbytes", "object_ssd_nbytes", "tenant_nbytes"):
            _require(getattr(self, name) >= 0, f"store_node.{name}", "0 or more", getattr(self, name))
        _require(
            self.chunk_nbytes >= 4096 and self.chunk_nbytes % 4096 == 0,
            "store_node.chunk_nbytes",
            "a multiple of 4096",
            self.chunk_nbytes,
        )
        _require(
            self.object_nbytes == 0 or self.object_nbytes >= self.chunk_nbytes,
            "store_node.object_nbytes",
            "0, or room for one chunk at least",
            self.object_nbytes,
        )


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    host: str = option("127.0.0.1", "address", "address of the API")
    port: int = option(8000, "port", "port of the API; 0: a free one")
    max_body_nbytes: int = option(8 << 20, "bytes", "largest request body")
    request_timeout_s: float = option(300.0, "seconds", "deadline of a request that sets none")
    max_requests: int = option(1024, "requests", "requests in flight; more are answered 429")
    max_attempts: int = option(4, "times", "how often a request is placed before it fails")
    slo_ttft_s: float = option(0.0, "seconds", "time to first token to keep; 0: any")
    slo_tbt_s: float = option(0.0, "seconds", "time between two tokens to keep; 0: any")
    rejection: str = option(
        "predicted",
        "name",
        "who is turned away when an SLO would be missed: none, baseline (at each stage as it comes), early "
        "(both stages at arrival), predicted (decode as it will be when the prefill is done)",
    )
    tenants_path: str = option(
        "", "path", "TOML file of API keys with their limits and weights; empty: anyone may ask"
    )
    results_path: str = option(
        "",
        "path",
        "directory of `moonpool bench … --json` files that the dashboard draws; empty: the checkout's own",
    )
    policy: str = option(
        "goodput",
        "name",
        "placement policy: goodput, kv-aware, local-cache, least-loaded, round-robin or random",
    )
    replicate_nbytes_per_s: int = option(
        256 << 20,
        "bytes/second",
        "bandwidth for copies of hot prefixes to more prefill nodes, and to a store node; 0: none",
    )

    def __post_init__(self) -> None:
        _require(0 <= self.port < 65536, "conductor.port", "from 0 to 65535", self.port)
        _require(
            self.request_timeout_s > 0, "conductor.request_timeout_s", "positive", self.request_timeout_s
        )
        for name in ("max_body_nbytes", "max_requests", "max_attempts"):
            _require(getattr(self, name) > 0, f"conductor.{name}", "positive", getattr(self, name))
        for name in ("slo_ttft_s", "slo_tbt_s", "replicate_nbytes_per_s"):
            _require(getattr(self, name) >= 0, f"conductor.{name}", "0 or more", getattr(self, name))
        rejections = ("none", "baseline", "early", "predicted")
        _require(
            self.rejection in rejections,
            "conductor.rejection",
            f"one of {', '.join(rejections)}",
            self.rejection,
        )
        policies = ("goodput", "kv-aware", "local-cache", "least-loaded", "round-robin", "random")
        _require(self.policy in policies, "conductor.policy", f"one of {', '.join(policies)}", self.policy)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    prefill: int = option(2, "nodes", "prefill nodes `moonpool up` starts")
    decode: int = option(2, "nodes", "decode nodes `moonpool up` starts")
    store: int = option(0, "nodes", "store nodes `moonpool up` starts")
    prefill_options: tuple[str, ...] = option(
        (), "names", "options of prefill nodes alone, as key=value, such as engine.parallel.tp=2"
    )
    decode_options: tuple[str, ...] = option((), "names", "options of decode nodes alone, as key=value")

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            _require(getattr(self, name) >= 1, f"cluster.{name}", "1 or more", getattr(self, name))
        _require(self.store >= 0, "cluster.store", "0 or more", self.store)


@dataclass(frozen=True, slots=True)
class HealthOptions:
    interval_s: float = option(5.0, "seconds", "how often a node looks at its host and GPUs; 0: never")
    bad_readings: int = option(3, "readings", "in a row beyond a limit, until the node is unhealthy")
    good_readings: int = option(6, "readings", "in a row within it, until the node is healthy again")
    gpu_lost: bool = option(True, "flag", "a GPU that the driver calls lost: the node drains and ends")
    gpu_memory_errors: int = option(
        1, "errors", "uncorrectable ones since the start, at which the node drains and ends; 0: any number"
    )
    gpu_temperature_margin: float = option(
        2.0, "celsius", "a GPU this near to the temperature where it slows down is too hot; 0: none is"
    )
    gpu_throttled_s: float = option(
        30.0, "seconds", "longest a GPU may be slowed down by its hardware (heat, power); 0: for ever"
    )
    host_memory_free: float = option(
        0.02, "fraction", "least memory to be available, beyond which processes are killed; 0: any"
    )
    disk_free_nbytes: int = option(
        256 << 20, "bytes", "least space free where store.ssd.path is, for its index and files; 0: any"
    )
    disk_write_s: float = option(
        1.0, "seconds", "longest a page may take to be durable at store.ssd.path; 0: any time"
    )
    network_errors_per_s: float = option(
        100.0,
        "packets/second",
        "most packets with errors or dropped, a few strays being usual; 0: any number",
    )

    def __post_init__(self) -> None:
        for name in ("bad_readings", "good_readings"):
            _require(getattr(self, name) > 0, f"health.{name}", "positive", getattr(self, name))
        for name in (
            "interval_s",
            "gpu_memory_errors",
            "gpu_temperature_margin",
            "gpu_throttled_s",
            "disk_free_nbytes",
            "disk_write_s",
            "network_errors_per_s",
        ):
            _require(getattr(self, name) >= 0, f"health.{name}", "0 or more", getattr(self, name))
        free = self.host_memory_free
        _require(0 <= free < 1, "health.host_memory_free", "from 0 to less than 1", free)


@dataclass(frozen=True, slots=True)
class LogOptions:
    level: str = option("info", "name", "debug, info, warning or error")
    format: str = option("text", "name", "text or json")
    prompt_chars: int = option(
        0,
        "characters",
        "how much of each prompt and of each answer a conductor logs; 0: people's words are in no log",
    )

    def __post_init__(self) -> None:
        _require(
            self.level in ("debug", "info", "warning", "error"),
            "log.level",
            "debug, info, warning or error",
            self.level,
        )
        _require(self.format in ("text", "json"), "log.format", "text or json", self.format)
        _require(self.prompt_chars >= 0, "log.prompt_chars", "0 or more", self.prompt_chars)


@dataclass(frozen=True, slots=True)
class TracingOptions:
    otlp_endpoint: str = option(
        "",
        "URL",
        "where OpenTelemetry spans go by OTLP over gRPC, such as http://127.0.0.1:4317; empty: nowhere",
    )

    def __post_init__(self) -> None:
        known = self.otlp_endpoint.startswith(("http://", "https://")) or not self.otlp_endpoint
        _require(known, "tracing.otlp_endpoint", "an http:// or https:// URL, or empty", self.otlp_endpoint)


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelOptions = _section(ModelOptions)
    engine: EngineOptions = _section(EngineOptions)
    store: StoreOptions = _section(StoreOptions)
    transfer: TransferOptions = _section(TransferOptions)
    index: IndexOptions = _section(IndexOptions)
    events: EventsOptions = _section(EventsOptions)
    node: NodeOptions = _section(NodeOptions)
    store_node: StoreNodeOptions = _section(StoreNodeOptions)
    conductor: ConductorOptions = _section(ConductorOptions)
    cluster: ClusterOptions = _section(ClusterOptions)
    health: HealthOptions = _section(HealthOptions)
    log: LogOptions = _section(LogOptions)
    tracing: TracingOptions = _section(TracingOptions)
