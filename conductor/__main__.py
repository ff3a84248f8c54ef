"""``python -m moonpool.conductor``: the OpenAI-compatible API in front of a cluster."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.sampling_defaults import SamplingDefaults
from moonpool.conductor.core import Conductor
from moonpool.conductor.fleet.providers.choice import provider_of
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.request_metrics import RequestMetrics
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.server import ApiServer
from moonpool.conductor.text.chat_template import load_chat_template
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.runtime.config.agreement import agreement_of, own_version
from moonpool.runtime.config.loading import shown_options
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.description import commit_here, describe_machine, versions_of
from moonpool.runtime.service.lifecycle import ServiceContext, run_service
from moonpool.runtime.structure.grammars import Grammars

log = logging.getLogger("moonpool.conductor")  # __name__ is __main__ here

# Packages that affect how it serves.
_PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "orjson", "uvloop", "tokenizers", "numpy")


async def main(config: Config, service: ServiceContext) -> None:
    """Serve until asked to stop, then drain (see ``ApiServer.drain``)."""
    path = config.model.directory
    model = ServedModel.from_checkpoint(
        path,
        block_size=config.engine.block_size,
        name=config.model.served_name,
        max_model_len=config.model.max_model_len,
    )
    conductor = Conductor(
        model,
        config.conductor,
        config.index,
        peer_host=config.node.host,
        peer_port=config.node.port,
        provider=provider_of(config),
        planner=config.planner,
    )
    server = ApiServer(await asyncio.to_thread(make_context, config, path, conductor))
    # Listen first: a port in use is a common error, and nothing needs undoing then.
    await server.start()
    try:
        url = f"{server.scheme}://{_reachable(config.conductor.host)}:{server.port}"
        conductor.describe(url=url, version=own_version(), options=agreement_of(config))
        await conductor.start()
        service.ready(url=url, metrics_url=f"{url}/metrics", model=model.name)
        await service.draining.wait()
        await server.drain(config.node.drain_s, config.conductor.leave_s)
    finally:
        await server.close()
        await conductor.close()


def make_context(config: Config, path: Path, conductor: Conductor) -> ApiContext:
    """Load tokenizer, chat template and defaults from the checkpoint. Raises ``ConfigError``."""
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
    return ApiContext(
        conductor=conductor,
        tokenizer=tokenizer,
        template=template,
        defaults=SamplingDefaults.from_checkpoint(path),
        metrics=RequestMetrics(conductor.model.name, slo=Slo.of(config.conductor)),
        options=config.conductor,
        log_options=config.log,
        grammars=Grammars(path, conductor.model.vocab_size, conductor.model.eos_token_ids),
        streams=conductor.streams,
        gate=Gate.load(config.conductor.tenants_path),
        about=_about(config),
    )


def _about(config: Config) -> dict[str, Any]:
    """Plain JSON types, without secrets. Runs git, some milliseconds: call once."""
    return {
        "moonpool": version("moonpool"),
        "commit": commit_here(),
        "machine": describe_machine(),
        "versions": versions_of(_PACKAGES),
        "started_unix_s": time.time(),
        "options": shown_options(config),
    }


def _reachable(host: str) -> str:
    """The address to connect to for a listening address ``host``."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(run_service(main, role="conductor"))
