"""Import all that the daemons import, and print the first word of the name of every module that is loaded."""

from __future__ import annotations

import sys

import moonpool.cli
import moonpool.conductor
import moonpool.kvstore.store_node.node
import moonpool.node.node  # noqa: F401

print(*sorted({name.partition(".")[0] for name in sys.modules}))
