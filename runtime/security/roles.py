"""The roles of processes in a cluster, and the calls that each may make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moonpool.runtime.errors import MoonpoolError

CONDUCTOR: Final = "conductor"
NODE: Final = "node"
CLIENT: Final = "client"
"""Reads and writes objects on store nodes."""
OPERATOR: Final = "operator"
"""A person with the command line."""
SERVER_NAME: Final = "moonpool.internal"
"""The DNS name in the certificates of conductors and nodes."""
ROLES: Final = (CONDUCTOR, NODE, CLIENT, OPERATOR)


@dataclass(frozen=True, slots=True)
class Caller:
    """Another process, as its key or its certificate proves. ``name``: as it calls itself."""

    role: str
    name: str


class Unauthenticated(MoonpoolError):
    """The caller did not prove who it is. The call had no effect."""

    code = "UNAUTHENTICATED"


class NotPermitted(MoonpoolError):
    """The caller's role may not make this call. The call had no effect."""

    code = "PERMISSION_DENIED"


_ALL = frozenset(ROLES)
_SCHEDULING = frozenset({CONDUCTOR, OPERATOR})
_BLOCKS = frozenset({NODE, OPERATOR})
_OBJECTS = frozenset({CLIENT, NODE, OPERATOR})

# By method. A method that is missing here is refused to everybody.
PERMITTED: Final = {
    "ConductorPeer/Share": frozenset({CONDUCTOR}),
    "ConductorPeer/Book": frozenset({CONDUCTOR}),
    "Node/Status": _ALL,
    "Node/Drain": _SCHEDULING,
    "Node/Lease": _BLOCKS,
    "Node/Renew": _BLOCKS,
    "Node/Release": _BLOCKS,
    "Node/ListBlocks": _SCHEDULING,
    # A node that joins asks for no blocks, only to be connected to: see ``process.require``.
    "Node/Replicate": _SCHEDULING | {NODE},
    "Node/Evict": _SCHEDULING,
    "Node/Cancel": _SCHEDULING,
    "Experts/Load": _SCHEDULING,
    "PrefillNode/Prefill": frozenset({CONDUCTOR}),
    "PrefillNode/Follow": frozenset({NODE}),
    "DecodeNode/Decode": frozenset({CONDUCTOR}),
    "DecodeNode/Tokens": frozenset({CONDUCTOR}),
    "Store/Begin": _OBJECTS,
    "Store/Commit": _OBJECTS,
    "Store/Abort": _OBJECTS,
    "Store/Open": _OBJECTS,
    "Store/Close": _OBJECTS,
    "Store/Find": _OBJECTS,
    "Store/Check": _OBJECTS,
    "Store/Remove": _OBJECTS,
    "Store/Copy": _OBJECTS,
    "Store/List": _OBJECTS,
    "Store/Usage": _OBJECTS,
    "Store/Verify": _OBJECTS,
    "Store/Publish": _OBJECTS,
    "Store/Reconcile": _OBJECTS,
}


def check_permitted(caller: Caller, method: str) -> None:
    """``method``: as ``Node/Drain``. Raises ``NotPermitted``."""
    if caller.role not in PERMITTED.get(method, frozenset()):
        raise NotPermitted(f"{method} is not for the role {caller.role} ({caller.name})")
