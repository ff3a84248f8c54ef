"""What each prefill and decode node of a local cluster is configured as."""

from __future__ import annotations

from moonpool.runtime.config.loading import override
from moonpool.runtime.config.options import Config


def node_configs(config: Config) -> list[Config]:
    """Of each prefill and then of each decode node. Raises ConfigError: an option of a role is wrong."""
    counts = config.cluster
    prefill, decode = (override(config, one) for one in (counts.prefill_options, counts.decode_options))
    return [prefill] * counts.prefill + [decode] * counts.decode


def pools_nbytes(config: Config) -> int:
    """Memory for the pools of all of them, where they compute on CPUs."""
    return sum(one.engine.host_pool_nbytes * one.engine.parallel.dp for one in node_configs(config))
