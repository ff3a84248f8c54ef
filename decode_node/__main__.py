"""``python -m moonpool.decode_node``: the daemon."""

from __future__ import annotations

import sys

from moonpool.runtime.config.options import Config
from moonpool.runtime.replicas.group import ReplicaGroup
from moonpool.runtime.service.lifecycle import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    if config.engine.parallel.dp > 1:
        await ReplicaGroup(config, "decode", [sys.executable, "-m", "moonpool.decode_node"]).run(context)
        return
    # Imported here: the parent of replicas needs no torch.
    from moonpool.decode_node.node import DecodeNode

    await DecodeNode(config).run(context)


if __name__ == "__main__":
    sys.exit(run_service(main, role="decode-node"))
