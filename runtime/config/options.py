"""``Config``: all sections of options, frozen. ``moonpool.runtime.config.loading`` reads it from a file."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.engine_options import EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.config.section import section
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.config.service_options import (
    ClusterOptions,
    ConductorOptions,
    HealthOptions,
    LogOptions,
    NodeOptions,
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
from moonpool.runtime.config.transfer_options import TcpOptions, TlsOptions, TransferOptions

__all__ = [
    "EVICTION_POLICIES",
    "ClusterOptions",
    "ConductorOptions",
    "Config",
    "EngineOptions",
    "EventsOptions",
    "HealthOptions",
    "HostTierOptions",
    "IndexOptions",
    "LogOptions",
    "ModelOptions",
    "NodeOptions",
    "ParallelOptions",
    "SecurityOptions",
    "SsdTierOptions",
    "StoreNodeOptions",
    "StoreOptions",
    "TcpOptions",
    "TlsOptions",
    "TracingOptions",
    "TransferOptions",
]


@dataclass(frozen=True, slots=True)
class Config:
    model: ModelOptions = section(ModelOptions)
    engine: EngineOptions = section(EngineOptions)
    store: StoreOptions = section(StoreOptions)
    transfer: TransferOptions = section(TransferOptions)
    index: IndexOptions = section(IndexOptions)
    events: EventsOptions = section(EventsOptions)
    node: NodeOptions = section(NodeOptions)
    store_node: StoreNodeOptions = section(StoreNodeOptions)
    conductor: ConductorOptions = section(ConductorOptions)
    cluster: ClusterOptions = section(ClusterOptions)
    health: HealthOptions = section(HealthOptions)
    log: LogOptions = section(LogOptions)
    tracing: TracingOptions = section(TracingOptions)
    security: SecurityOptions = section(SecurityOptions)
