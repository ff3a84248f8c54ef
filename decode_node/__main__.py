"""``python -m decode_node``: the daemon."""

from __future__ import annotations

import sys

from decode_node.node import DecodeNode
from runtime.options import Config
from runtime.service import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    await DecodeNode(config).run(context)


if __name__ == "__main__":
    sys.exit(run_service(main, role="decode-node"))
