"""Modules that the fork server imports, so that the processes of a cluster need not."""

from __future__ import annotations

_CONDUCTOR = [
    "moonpool.conductor.api.models.lanes",
    "moonpool.conductor.core",
    "moonpool.conductor.fleet.providers.factory",
    "moonpool.conductor.server",
    "moonpool.conductor.text.chat_template",
    "moonpool.conductor.text.tokenizer",
    "moonpool.conductor.workers",
    "moonpool.runtime.config.conversion",
    "moonpool.runtime.config.models_file",
    "moonpool.runtime.machine.description",
    "moonpool.conductor.dashboard.benchmark_results",
    "moonpool.runtime.service.lifecycle",
    "llguidance",
]
PRELOAD = {
    "moonpool.conductor": _CONDUCTOR,
    "moonpool.kvstore.store_node": ["moonpool.kvstore.store_node.node"],
}
"""By the module of each process that does without torch."""

COMPUTE_PRELOAD = {
    "moonpool.node": [
        "llguidance",
        "torch",
        "moonpool.node.node",
        "moonpool.runtime.config.conversion",
        "moonpool.runtime.replicas.group",
    ],
    "moonpool.engine.ranks.worker": [
        "moonpool.engine.ranks.leader_call",
        "moonpool.engine.ranks.link_factory",
        "moonpool.kvstore.remote.rank_reader",
    ],
}
"""By the module of each process that needs torch, which takes as long to import as all the rest: so a
second fork server imports it."""
