"""``python -m moonpool.node --role ROLE``: the daemon."""

from __future__ import annotations

import argparse
import sys

from moonpool.kvstore.index.redis.node_record import ROLES
from moonpool.runtime.config.options import Config
from moonpool.runtime.replicas.group import ReplicaGroup, replica_configs
from moonpool.runtime.service.lifecycle import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    role = context.arguments.role
    config = config.with_adapters(context.arguments.lora)
    if config.engine.parallel.dp > 1:
        command = [sys.executable, "-m", "moonpool.node", "--role", role]
        drain_s = config.node.drain_s + config.store.flush_s
        await ReplicaGroup(config, role, command, replica_configs(config), drain_s=drain_s).run(context)
        return
    # Imported here: the parent of replicas needs no torch.
    from moonpool.node.node import ComputeNode

    await ComputeNode(config, role).run(context)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="moonpool node", allow_abbrev=False)
    arguments.add_argument("--role", choices=ROLES, default="both", help="what requests are placed on it for")
    arguments.add_argument(
        "--lora", action="append", default=[], metavar="NAME=DIR", help="serve a LoRA adapter; repeatable"
    )
    sys.exit(run_service(main, role="node", parser=arguments))
