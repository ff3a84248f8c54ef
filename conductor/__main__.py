"""``python -m moonpool.conductor``: the OpenAI-compatible API in front of a cluster."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from functools import partial
from typing import Any

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.conductor.api.responses.conversations import Conversations
from moonpool.conductor.api.sampling_defaults import SamplingDefaults
from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet.providers.factory import provider_of
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.request_metrics import RequestMetrics
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.arbiter import Arbiter
from moonpool.conductor.server import ApiServer
from moonpool.conductor.text.chat_template import load_chat_template
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.conductor.workers import group_of, run_workers, serve_worker_metrics
from moonpool.kvstore.index.redis.node_record import STAGES
from moonpool.runtime.config.agreement import agreement_of
from moonpool.runtime.config.loading import shown_options
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.description import own_version
from moonpool.runtime.network.http_listening import reachable
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.reports.conditions import load_average
from moonpool.runtime.reports.report import measure_environment
from moonpool.runtime.service.lifecycle import ServiceContext, run_service
from moonpool.runtime.structure.grammars import Grammars

log = logging.getLogger("moonpool.conductor")  # __name__ is __main__ here

# Packages that affect how it serves.
_PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "orjson", "uvloop", "tokenizers", "numpy")


async def main(config: Config, service: ServiceContext) -> None:
    """Serve until asked to stop, then drain (see ``ApiServer.drain``)."""
    if config.conductor.workers > 1:
        await run_workers(config, service)
        return
    served = served_models(config)
    conductors: list[Conductor] = []
    for one in served.models:
        leader = conductors[0] if conductors else None
        conductors.append(conductor_of(one.config, 0 if leader else config.node.port, leader))
    first = await asyncio.to_thread(make_context, served.models[0].config, conductors[0])
    if first.grammars is not None:
        await first.grammars.warm_up()
    lanes = [
        Lane(one.name, conductor, partial(make_context, one.config, conductor, first), one.aliases)
        for one, conductor in zip(served.models, conductors, strict=True)
    ]
    lanes[0].loaded = first
    canaries = conductors[0].canaries if len(lanes) > 1 else None
    arbiter = Arbiter(
        [conductor.borrower for conductor in conductors],
        conductors[0].planner_lease,
        clock=time.monotonic,
        on_decision=conductors[0].on_decision,
    )
    all_lanes = Lanes(lanes, served.routes, canaries, arbiter)
    worker = Replica.ours()
    server = ApiServer(first, all_lanes, shares_port=worker is not None)
    # Listen first: a port in use is a common error, and nothing needs undoing then.
    await server.start()
    try:
        url = f"{server.scheme}://{host_port(reachable(config.conductor.host), server.port)}"
        metrics_url = f"{url}/metrics"
        if worker is not None:
            first.workers_page = worker.metrics_url
            metrics_url = serve_worker_metrics(
                config, first.metrics.registry, lambda: first.metrics.see_cluster(all_lanes.counts())
            )
        for one, conductor in zip(served.models, conductors, strict=True):
            conductor.describe(url=url, version=own_version(), options=agreement_of(one.config))
            conductor.describe(region=one.config.node.region, zone=one.config.node.zone)
            if worker is not None:
                conductor.describe(group=group_of(worker), worker_port=server.worker_port)
            await conductor.start()
        if canaries is not None:
            await canaries.start()
            arbiter.start()
        service.ready(
            url=url, metrics_url=metrics_url, model=served.models[0].name, conductor_id=conductors[0].id
        )
        await service.draining.wait()
        await server.drain(config.node.drain_s, config.conductor.leave_s)
    finally:
        await server.close()
        await arbiter.close()
        if canaries is not None:
            await canaries.close()
        # The first one has the connection of the planners' lease.
        await asyncio.gather(*(conductor.close() for conductor in conductors[1:]))
        await conductors[0].close()


def conductor_of(config: Config, peer_port: int, leader: Conductor | None = None) -> Conductor:
    """The conductor of one model; ``leader``: that of the first one. Raises ``ConfigError``."""
    model = ServedModel.from_checkpoint(
        config.model.directory,
        block_size=config.engine.block_size,
        name=config.model.served_name,
        max_model_len=config.model.max_model_len,
    )
    return Conductor(
        model,
        config.conductor,
        config.index,
        peer_host=config.node.host,
        peer_port=peer_port,
        provider=provider_of(config),
        planner=config.planner,
        price=config.model.price,
        region=config.node.region,
        first_roles=("both",) if config.cluster.both else STAGES,
        leader=leader,
    )


def make_context(config: Config, conductor: Conductor, first: ApiContext | None = None) -> ApiContext:
    """Load tokenizer, chat template and defaults from the checkpoint. ``first``: that of the API's first
    model, with which all share keys, records and metrics. Raises ``ConfigError``."""
    path = config.model.directory
    tokenizer = Tokenizer.from_checkpoint(path)
    template = load_chat_template(path, tokenizer.config, tokenizer.special_tokens)
    log.info(
        "model %s: %d tokens, %s detokenizer, %s",
        conductor.model.name,
        tokenizer.vocab_size,
        tokenizer.detokenizer_kind,
        "chat template" if template else "no chat template",
    )
    conductor.describe(
        tokenizer=tokenizer.fingerprint, chat_template=template.fingerprint if template else "none"
    )
    name, slo = conductor.model.name, Slo.of(config.conductor)
    shared: dict[str, Any] = (
        {
            "metrics": RequestMetrics(name, slo=slo),
            "gate": Gate.load(config.conductor.tenants_path),
            "conversations": Conversations(conductor.conversations),
        }
        if first is None
        else {
            "metrics": RequestMetrics(name, first.metrics.registry, slo, first.metrics),
            "gate": first.gate,
            "recent": first.recent,
            "conversations": first.conversations,
        }
    )
    return ApiContext(
        conductor=conductor,
        tokenizer=tokenizer,
        template=template,
        defaults=SamplingDefaults.from_checkpoint(path),
        options=config.conductor,
        log_options=config.log,
        grammars=Grammars(path, conductor.model.vocab_size, conductor.model.eos_token_ids),
        streams=conductor.streams,
        about=_about(config) if first is None else first.about,
        **shared,
    )


def _about(config: Config) -> dict[str, Any]:
    """Plain JSON types, without secrets. Runs git, some milliseconds: call once."""
    measured = measure_environment(_PACKAGES)
    return {
        "moonpool": own_version(),
        "commit": measured.commit,
        "machine": measured.machine,
        "versions": dict(measured.versions),
        "command": measured.command,
        "load_average": load_average(),
        "started_unix_s": time.time(),
        "options": shown_options(config),
    }


if __name__ == "__main__":
    sys.exit(run_service(main, role="conductor"))
