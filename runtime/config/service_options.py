"""Options of the conductor and of node processes: addresses, admission, health, logs and tracing."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require


@dataclass(frozen=True, slots=True)
class NodeOptions(Section, name="node"):
    id: str = option("", "text", "name of this node; empty: its role, host and port")
    host: str = option("127.0.0.1", "address", "address to listen on and to announce to the cluster")
    port: int = option(0, "port", "gRPC port; 0: a free one", least=0, most=65535)
    metrics_port: int = option(0, "port", "HTTP port of /metrics; 0: a free one", least=0, most=65535)
    host_id: str = option(
        "",
        "text",
        "what store nodes that fail together have in common: copies of an object go to different ones; "
        "empty: the machine",
    )
    region: str = option(
        "", "name", "region of this node or conductor, such as eu: what tenants may be confined to"
    )
    zone: str = option("", "name", "zone within node.region; shown only")
    orphan_s: float = option(
        5.0, "seconds", "how long a decode node keeps the requests of a conductor that reads no tokens"
    )
    drain_s: float = option(30.0, "seconds", "how long SIGTERM waits for running requests")
    gated: bool = option(
        False, "flag", "no requests before a rollout's health gate has passed; rollouts set it"
    )


@dataclass(frozen=True, slots=True)
class ConductorOptions(Section, name="conductor"):
    host: str = option("127.0.0.1", "address", "address of the API")
    port: int = option(8000, "port", "port of the API; 0: a free one", least=0, most=65535)
    workers: int = option(
        1,
        "processes",
        "processes that serve the API at this port, each with a mirror of the index and limits of its own",
        least=1,
        most=64,
    )
    cert: str = option(
        "",
        "path",
        "certificate of the API (PEM), such as one that browsers know; empty: security.cert. Without either, "
        "the API is plain HTTP",
    )
    key: str = option("", "path", "private key of conductor.cert (PEM)")
    max_body_nbytes: int = option(8 << 20, "bytes", "largest request body", least=1)
    request_timeout_s: float = option(
        300.0, "seconds", "how long a request may run once it is placed", above=0
    )
    wait_timeout_s: float = option(
        3600.0, "seconds", "how long a batch request, or a part of a large one, waits for its turn", above=0
    )
    write_timeout_s: float = option(
        30.0, "seconds", "how long a stream waits for its client to read before the request is ended", above=0
    )
    leave_s: float = option(
        5.0,
        "seconds",
        "how long SIGTERM serves on with /readyz at 503, for load balancers to notice; `moonpool up`: 0",
        least=0,
    )
    max_requests: int = option(1024, "requests", "requests in flight; more are answered 429", least=1)
    max_attempts: int = option(
        4, "times", "how often a request is placed without another token before it fails", least=1
    )
    slo_ttft_s: float = option(0.0, "seconds", "SLO of the time to first token; 0: none", least=0)
    slo_tbt_s: float = option(0.0, "seconds", "SLO of the time between two tokens; 0: none", least=0)
    rejection: str = option(
        "early",
        "name",
        "which requests to reject when an SLO would be violated: none, baseline (at each stage), early (both "
        "stages at arrival; on most loads the most within the SLOs) or predicted (decode load as predicted "
        "for the end of the prefill)",
        choices=("none", "baseline", "early", "predicted"),
    )
    tenants_path: str = option(
        "",
        "path",
        "TOML file of API keys and tenants with their limits, read again when it changes; empty: no key is "
        "needed",
    )
    results_path: str = option(
        "",
        "path",
        "directory of `moonpool bench … --json` files for the dashboard; empty: the checkout's own",
    )
    engine_key: str = option(
        "",
        "text",
        "what vLLM engines were started with as --api-key; empty: they ask for none",
        secret=True,
    )
    engines: tuple[str, ...] = option(
        (),
        "names",
        "vLLM servers that do not register themselves, each as URL [role=ROLE] [model=NAME]; roles are "
        "prefill, decode and both",
    )
    tool_format: str = option(
        "auto",
        "name",
        "how the model writes calls of tools: hermes (also Qwen), llama3 or mistral; auto: as the chat "
        "template says",
        choices=("auto", "hermes", "llama3", "mistral"),
    )
    policy: str = option(
        "goodput",
        "name",
        "placement policy",
        choices=("goodput", "kv-aware", "local-cache", "least-loaded", "round-robin", "random"),
    )
    migrate: tuple[str, ...] = option(
        ("drain",),
        "names",
        "why running requests are moved to other decode nodes: drain (their node ends or no longer decodes), "
        "defragment (a prompt fits nowhere, though enough blocks are free in all), hot-spot (steps of their "
        "node are longer than slo_tbt_s), priority (a more urgent request waits for blocks there); and "
        "queue: prompts that wait are placed again where another node would begin a second sooner; empty: "
        "only when asked",
        choices=("drain", "defragment", "hot-spot", "priority", "queue"),
    )
    region_links: tuple[str, ...] = option(
        (),
        "links",
        "what lies between regions (node.region), each A:B [rtt_ms=MS] [gbit_s=RATE] [price_gb=MONEY], the "
        "money in the currency of model.price",
    )
    replicate_nbytes_per_s: int = option(
        256 << 20,
        "bytes/second",
        "bandwidth for copies of hot prefixes to other prefill nodes and to a store node; 0: no copies",
        least=0,
    )

    def _check(self) -> None:
        both = bool(self.cert) == bool(self.key)
        require(both, "conductor.cert", "set together with conductor.key, or neither", self.cert or self.key)


@dataclass(frozen=True, slots=True)
class RouterOptions(Section, name="router"):
    cells: tuple[str, ...] = option(
        (),
        "names",
        "cells of `moonpool router`, each NAME=URL [URL …] [region=REGION]: the conductors of one cluster",
    )
    read_key: str = option(
        "",
        "text",
        "one of the cells' read_keys; empty: they ask for none",
        secret=True,
    )


@dataclass(frozen=True, slots=True)
class ClusterOptions(Section, name="cluster"):
    prefill: int = option(
        -1,
        "nodes",
        "prefill nodes `moonpool up` starts; -1: 2, and none beside cluster.both; on GPUs as many as have "
        "their own, so on a single GPU one node that does both",
        least=-1,
    )
    decode: int = option(-1, "nodes", "the same for decode nodes", least=-1)
    both: int = option(0, "nodes", "nodes that prefill and decode `moonpool up` starts", least=0)
    store: int = option(0, "nodes", "store nodes `moonpool up` starts", least=0)
    most: int = option(
        0,
        "nodes",
        "most nodes that compute, of all models together, in `moonpool up`; 0: as many as there is memory or "
        "GPUs for",
        least=0,
    )
    engine: str = option(
        "moonpool",
        "name",
        "what computes on the nodes that `moonpool up` starts: Moonpool's own engine, or vLLM's server",
        choices=("moonpool", "vllm"),
    )
    prefill_options: tuple[str, ...] = option(
        (), "names", "options of prefill nodes alone, as key=value, such as engine.parallel.tp=2"
    )
    decode_options: tuple[str, ...] = option((), "names", "options of decode nodes alone, as key=value")

    def _check(self) -> None:
        for stage, count in (("prefill", self.prefill), ("decode", self.decode)):
            require(count != 0 or self.both > 0, f"cluster.{stage}", "at least 1 without cluster.both", count)

    @property
    def num_compute(self) -> int:
        """Nodes with an engine, none of them -1."""
        return self.prefill + self.decode + self.both


@dataclass(frozen=True, slots=True)
class HealthOptions(Section, name="health"):
    interval_s: float = option(
        5.0, "seconds", "how often a node reads the state of its host and GPUs; 0: never", least=0
    )
    bad_readings: int = option(
        3, "readings", "consecutive readings beyond a limit that make a node unhealthy", least=1
    )
    good_readings: int = option(
        6, "readings", "consecutive readings within the limits that make it healthy again", least=1
    )
    gpu_lost: bool = option(True, "flag", "drain and end the node when the driver reports its GPU as lost")
    gpu_memory_errors: int = option(
        1,
        "errors",
        "uncorrectable GPU memory errors since the start at which the node drains and ends; 0: no limit",
        least=0,
    )
    gpu_xid: bool = option(
        True, "flag", "drain and end the node when the driver reports an Xid that is no error of a program"
    )
    gpu_memory_taken: float = option(
        0.05,
        "fraction",
        "most of a GPU's memory that others may take after the node has sized its pool; 0: no limit",
        least=0,
    )
    gpu_temperature_margin: float = option(
        2.0, "celsius", "least distance to the temperature where a GPU slows down; 0: no limit", least=0
    )
    gpu_throttled_s: float = option(
        30.0,
        "seconds",
        "longest a GPU may be slowed down by its hardware (heat, power); 0: no limit",
        least=0,
    )
    host_memory_free: float = option(
        0.02, "fraction", "least part of the host's memory that must be available; 0: no limit", least=0
    )
    memory_pressure: float = option(
        0.3,
        "fraction",
        "most of the time that all processes of the host may wait for memory; 0: no limit",
        least=0,
    )
    open_files_free: float = option(
        0.05,
        "fraction",
        "least part of a process's file descriptors that must be unused; 0: no limit",
        least=0,
    )
    disk_free_nbytes: int = option(
        256 << 20, "bytes", "least free space at store.ssd.path; 0: no limit", least=0
    )
    disk_write_s: float = option(
        1.0, "seconds", "longest a durable write of a page at store.ssd.path may take; 0: no limit", least=0
    )
    network_errors_per_s: float = option(
        100.0, "packets/second", "most packets with errors or dropped; 0: no limit", least=0
    )

    def _check(self) -> None:
        for name in ("gpu_memory_taken", "host_memory_free", "memory_pressure", "open_files_free"):
            value = getattr(self, name)
            require(value < 1, f"health.{name}", "less than 1", value)


@dataclass(frozen=True, slots=True)
class LogOptions(Section, name="log"):
    level: str = option(
        "info", "name", "least level of log lines", choices=("debug", "info", "warning", "error")
    )
    format: str = option("text", "name", "format of log lines", choices=("text", "json"))
    prompt_chars: int = option(
        0,
        "characters",
        "characters of each prompt and answer that a conductor logs; 0: prompts are never logged",
        least=0,
    )


@dataclass(frozen=True, slots=True)
class AuditOptions(Section, name="audit"):
    path: str = option(
        "",
        "path",
        "directory of audit lines (administrative and refused calls) and usage lines (requests) as JSON; "
        "empty: none; `moonpool up`: with its logs",
    )
    file_nbytes: int = option(16 << 20, "bytes", "size at which a file of lines begins anew", least=64 << 10)
    files: int = option(8, "files", "files of each kind that a process keeps", least=1)


@dataclass(frozen=True, slots=True)
class TracingOptions(Section, name="tracing"):
    otlp_endpoint: str = option(
        "",
        "URL",
        "where OpenTelemetry spans are sent (OTLP over gRPC), such as http://127.0.0.1:4317; empty: not sent",
    )

    def _check(self) -> None:
        known = self.otlp_endpoint.startswith(("http://", "https://")) or not self.otlp_endpoint
        require(known, "tracing.otlp_endpoint", "an http:// or https:// URL, or empty", self.otlp_endpoint)
