"""``python -m prefill_node``: the daemon."""

from __future__ import annotations

import sys

from prefill_node.node import PrefillNode
from runtime.options import Config
from runtime.service import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    await PrefillNode(config).run(context)


if __name__ == "__main__":
    sys.exit(run_service(main, role="prefill-node"))
