"""The configuration of each prefill and decode node of a local cluster."""

from __future__ import annotations

from moonpool.runtime.config.loading import override
from moonpool.runtime.config.options import Config


def node_configs(config: Config) -> list[Config]:
    """Return the configurations of the prefill, then of the decode nodes. Raises ``ConfigError``."""
    counts = config.cluster
    prefill, decode = (override(config, one) for one in (counts.prefill_options, counts.decode_options))
    return [prefill] * counts.prefill + [decode] * counts.decode


def pools_nbytes(config: Config) -> int:
    """Return the memory of all pools on CPUs."""
    return sum(one.engine.host_pool_nbytes * one.engine.parallel.dp for one in node_configs(config))
