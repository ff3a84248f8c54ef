"""The roles of processes in a cluster, and the calls that each may make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

CONDUCTOR: Final = "conductor"
NODE: Final = "node"
CLIENT: Final = "client"
"""Reads and writes objects on store nodes."""
OPERATOR: Final = "operator"
"""A person with the command line."""
SERVER_NAME: Final = "moonpool.internal"
"""The DNS name in the certificates of conductors and nodes."""
REVOKED_NAME: Final = "crl.pem"
"""The list of revoked certificates, beside that of the authority."""
ROLES: Final = (CONDUCTOR, NODE, CLIENT, OPERATOR)
_URI = "spiffe://moonpool/"


@dataclass(frozen=True, slots=True)
class Caller:
    """Another process, as its key or its certificate proves. ``name``: as it calls itself."""

    role: str
    name: str

    @property
    def uri(self) -> str:
        """This caller among the names in its certificate."""
        return f"{_URI}{self.role}/{quote(self.name, safe='')}"


class Unauthenticated(MoonpoolError):
    """The caller did not prove who it is. The call had no effect."""

    code = "UNAUTHENTICATED"
    failure = FailureClass.REQUEST


class NotPermitted(MoonpoolError):
    """The caller's role may not make this call. The call had no effect. who: the caller."""

    code = "PERMISSION_DENIED"
    failure = FailureClass.REQUEST

    def __init__(self, sentence: str, who: Caller | None = None) -> None:
        super().__init__(sentence)
        self.who = who


def owner_of(names: Sequence[str]) -> Caller:
    """The owner that a certificate's URIs tell. Raises ``Unauthenticated``: they name no role."""
    for name in names:
        role, slash, owner = name.removeprefix(_URI).partition("/")
        if name.startswith(_URI) and slash:
            return Caller(role, unquote(owner))
    raise Unauthenticated(
        "the caller's certificate names no role: `moonpool certs issue` makes one that does"
    )


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
    "Node/Hint": _SCHEDULING,
    "Node/Cancel": _SCHEDULING,
    "Ranks/Join": frozenset({NODE}),
    "Roles/Switch": _SCHEDULING,
    "Experts/Load": _SCHEDULING,
    "Experts/Place": _SCHEDULING,
    "Adapters/Load": _SCHEDULING,
    "Adapters/Unload": _SCHEDULING,
    "Adapters/List": _SCHEDULING,
    "PrefillNode/Prefill": frozenset({CONDUCTOR}),
    "PrefillNode/Follow": frozenset({NODE}),
    "DecodeNode/Decode": frozenset({CONDUCTOR}),
    "DecodeNode/Tokens": frozenset({CONDUCTOR}),
    "DecodeNode/FollowDecode": frozenset({NODE}),
    "DecodeNode/Yield": frozenset({NODE}),
    "Supervisor/Start": _SCHEDULING,
    "Supervisor/Stop": _SCHEDULING,
    "Supervisor/Switch": _SCHEDULING,
    "Supervisor/Settle": _SCHEDULING,
    "Supervisor/List": _SCHEDULING,
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
        raise NotPermitted(f"{method} is not for the role {caller.role} ({caller.name})", caller)


# Calls that change what others see. Conductors and nodes make most of them as part of serving.
_ADMINISTRATIVE: Final = frozenset(
    {
        "Node/Evict",
        "Node/Replicate",
        "Node/Cancel",
        "Store/Remove",
        "Store/Verify",
        "Store/Reconcile",
    }
)


def is_administrative(caller: Caller | None, method: str) -> bool:
    """Whether a call gets an audit line. caller: None where no proof is demanded."""
    if method in ("Node/Drain", "Roles/Switch", "Adapters/Load", "Adapters/Unload"):
        return True
    if method in ("Supervisor/Start", "Supervisor/Stop", "Supervisor/Switch", "Supervisor/Settle"):
        return True
    return method in _ADMINISTRATIVE and (caller is None or caller.role not in (CONDUCTOR, NODE))
