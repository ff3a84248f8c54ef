"""``Config``: all sections of options, frozen. ``moonpool.runtime.config.loading`` reads it from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.runtime.config.engine_options import (
    EngineOptions,
    LoraOptions,
    ModelOptions,
    ModelsOptions,
    ParallelOptions,
)
from moonpool.runtime.config.fleet_options import FleetOptions, PlannerOptions
from moonpool.runtime.config.section import require, section
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.config.service_options import (
    AuditOptions,
    ClusterOptions,
    ConductorOptions,
    HealthOptions,
    LogOptions,
    NodeOptions,
    RouterOptions,
    TracingOptions,
)
from moonpool.runtime.config.store_options import (
    EVICTION_POLICIES,
    EventsOptions,
    HostTierOptions,
    IndexOptions,
    SsdTierOptions,
    StoreNodeOptions,
    StoreOptions,
)
from moonpool.runtime.config.transfer_options import TcpOptions, TransferOptions

__all__ = [
    "EVICTION_POLICIES",
    "AuditOptions",
    "ClusterOptions",
    "ConductorOptions",
    "Config",
    "EngineOptions",
    "EventsOptions",
    "FleetOptions",
    "HealthOptions",
    "HostTierOptions",
    "IndexOptions",
    "LogOptions",
    "LoraOptions",
    "ModelOptions",
    "ModelsOptions",
    "NodeOptions",
    "ParallelOptions",
    "PlannerOptions",
    "RouterOptions",
    "SecurityOptions",
    "SsdTierOptions",
    "StoreNodeOptions",
    "StoreOptions",
    "TcpOptions",
    "TracingOptions",
    "TransferOptions",
]


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelOptions = section(ModelOptions)
    models: ModelsOptions = section(ModelsOptions)
    engine: EngineOptions = section(EngineOptions)
    lora: LoraOptions = section(LoraOptions)
    store: StoreOptions = section(StoreOptions)
    transfer: TransferOptions = section(TransferOptions)
    index: IndexOptions = section(IndexOptions)
    events: EventsOptions = section(EventsOptions)
    node: NodeOptions = section(NodeOptions)
    store_node: StoreNodeOptions = section(StoreNodeOptions)
    conductor: ConductorOptions = section(ConductorOptions)
    router: RouterOptions = section(RouterOptions)
    cluster: ClusterOptions = section(ClusterOptions)
    fleet: FleetOptions = section(FleetOptions)
    planner: PlannerOptions = section(PlannerOptions)
    health: HealthOptions = section(HealthOptions)
    log: LogOptions = section(LogOptions)
    audit: AuditOptions = section(AuditOptions)
    tracing: TracingOptions = section(TracingOptions)
    security: SecurityOptions = section(SecurityOptions)

    def __post_init__(self) -> None:
        require(
            not (self.security.cert and "ucx" in self.transfer.transports),
            "transfer.transports",
            "without ucx where security.cert is set, because UCX does not encrypt; security.cluster_key "
            "alone authenticates without encrypting",
            self.transfer.transports,
        )

    def with_adapters(self, adapters: Sequence[str]) -> Config:
        """Return this with more LoRA adapters, each NAME=DIRECTORY from here. Raises ConfigError."""
        split = (each.partition("=") for each in adapters)
        more = [f"{name}={Path(path).absolute()}" if path else name for name, _, path in split]
        return replace(self, lora=replace(self.lora, adapters=(*self.lora.adapters, *more)))
