"""The LoRA adapters that requests may name: of the nodes' records, and what was changed here since."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath

from moonpool.conductor.errors import NoNodes
from moonpool.conductor.fleet.errors import AdapterFailed, AdapterInvalid, AdapterMissing
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError, RemoteError

# After a change, until then the nodes' records have what they answered.
_SETTLED_S = 30.0
# Requests wait so long for the names of a node that has just joined.
_ASKED_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
# Statuses of a node for an adapter that no node would take.
_INVALID = ("INVALID_ARGUMENT", "ALREADY_EXISTS")


class AdapterDirectory:
    """Names are looked up in memory: an unknown one costs no call. Of two records the newer one counts."""

    def __init__(self, registry: NodeRegistry, served_name: str, unix_clock: Callable[[], float]) -> None:
        """``served_name``: the model's, which no adapter may have."""
        self._registry, self._served_name, self._unix_clock = registry, served_name, unix_clock
        # What this conductor changed lately, by name: until when that counts, its time, and None: unloaded.
        self._changes: dict[str, tuple[float, float, node_pb2.Adapter | None]] = {}
        self._turn = asyncio.Lock()

    def find(self, name: str) -> node_pb2.Adapter | None:
        """The adapter of this name; None: there is none."""
        found = [one for member in self._registry.computing() if (one := member.adapters.get(name))]
        newest = max(found, key=lambda one: one.loaded_unix_s, default=None)
        until_s, changed_s, change = self._changes.get(name, (0.0, 0.0, None))
        if self._unix_clock() < until_s and (newest is None or newest.loaded_unix_s <= changed_s):
            return change
        return newest

    async def awaited(self, name: str) -> node_pb2.Adapter | None:
        """As ``find``; where nodes are being asked for their names, which is after a change of them, wait for
        what they answer."""
        found = self.find(name)
        if found is None:
            asked = [task for member in self._registry.computing() if (task := member.adapters.asking)]
            if asked:
                await asyncio.wait(asked, timeout=_ASKED_S)
                found = self.find(name)
        return found

    def all(self) -> list[node_pb2.Adapter]:
        """All adapters by name."""
        names = set(self._changes).union(*(member.adapters.names() for member in self._registry.computing()))
        return [adapter for name in sorted(names) if (adapter := self.find(name)) is not None]

    async def load(self, name: str, path: str, *, replace: bool) -> node_pb2.Adapter:
        """Have every node read and check the adapter at ``path``, a directory that each of them has.

        Raises:
            AdapterInvalid: the name, the path or its files are refused, or the name has another content.
            NoNodes: there is no node with an engine.
            AdapterFailed: a node did not answer. Ask again: nodes that have it stay as they are.
        Where the name was unknown, no node knows it after AdapterInvalid.
        """
        if not _NAME.fullmatch(name) or name == self._served_name:
            raise AdapterInvalid(
                f"lora_name: {name[:128]!r} cannot be the name of an adapter: use letters, digits and ._:/-, "
                "and not the name of the model"
            )
        if not PurePosixPath(path).is_absolute():
            raise AdapterInvalid(f"lora_path: {path[:256]!r} must be an absolute path on the nodes")
        async with self._turn:
            known, now_s = self.find(name), self._unix_clock()
            request = node_pb2.LoadAdapterRequest(name=name, path=path, replace=replace, loaded_unix_s=now_s)
            loaded, errors = await self._ask_all(lambda member: member.client.load_adapter(request))
            adapter = next(iter(loaded.values()), None)
            if not errors and len({one.digest for one in loaded.values()}) > 1:
                errors = [
                    AdapterInvalid(f"{path} has other files on some nodes: {', '.join(sorted(loaded))}")
                ]
            if errors:
                if known is None:
                    await self._ask_all(lambda member: member.client.unload_adapter(name))
                raise _as_one(errors)
            assert adapter is not None
            self._remember(name, now_s, adapter)
            return adapter

    async def unload(self, name: str) -> None:
        """Have every node forget the adapter; requests that have begun finish with it.

        Raises AdapterMissing, or AdapterFailed: a node did not answer; ask again.
        """
        async with self._turn:
            if self.find(name) is None:
                raise AdapterMissing(f"no adapter {name[:128]!r} is loaded: see /v1/models")
            _, errors = await self._ask_all(lambda member: member.client.unload_adapter(name))
            if errors:
                raise _as_one(errors)
            self._remember(name, self._unix_clock(), None)

    async def _ask_all(
        self, ask: Callable[[Member], Awaitable[node_pb2.Adapter]]
    ) -> tuple[dict[str, node_pb2.Adapter], list[MoonpoolError]]:
        """Ask every node with an engine at once. Return what they answered by node, and their errors."""
        members = [member for member in self._registry.computing() if member.client.connected]
        if not members:
            raise NoNodes("prefill", 0.0)

        async def one(member: Member) -> node_pb2.Adapter | MoonpoolError:
            try:
                return await ask(member)
            except MoonpoolError as error:
                return error

        answers = await asyncio.gather(*map(one, members))
        found = {
            member.node_id: answer
            for member, answer in zip(members, answers, strict=True)
            if not isinstance(answer, MoonpoolError)
        }
        return found, [answer for answer in answers if isinstance(answer, MoonpoolError)]

    def _remember(self, name: str, changed_s: float, adapter: node_pb2.Adapter | None) -> None:
        """``changed_s``: when the nodes were asked; they may have taken long."""
        now_s = self._unix_clock()
        self._changes = {name: one for name, one in self._changes.items() if now_s < one[0]}
        self._changes[name] = now_s + _SETTLED_S, changed_s, adapter


def _as_one(errors: list[MoonpoolError]) -> MoonpoolError:
    """The error that tells most: of the adapter before that of a node."""
    for error in errors:
        if isinstance(error, AdapterInvalid):
            return error
        if isinstance(error, RemoteError) and error.status in _INVALID:
            return AdapterInvalid(str(error))
    return AdapterFailed(str(errors[0]))
