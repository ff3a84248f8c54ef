"""``python -m moonpool.kvstore.store_node``"""

from __future__ import annotations

import sys

from moonpool.kvstore.store_node.node import StoreNode
from moonpool.runtime.config.options import Config
from moonpool.runtime.service.lifecycle import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    await StoreNode(config).run(context)


if __name__ == "__main__":
    sys.exit(run_service(main, role="store-node"))
