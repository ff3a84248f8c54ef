"""The adapters that a node knows by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.adapters.shapes import AdapterShapes
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterNameTaken, AdapterRefused

MOST_ADAPTERS = 16_384
"""Names of one node."""


class AdapterRegistry:
    """Names are unique; an adapter that is registered was read and checked once. On one event loop.

    version: another one after each change of the names; 0: there never was one.
    """

    def __init__(self, config: ModelConfig, shapes: AdapterShapes, reader: ThreadPoolExecutor) -> None:
        """``reader``: where files are read."""
        self._config, self._shapes, self._reader = config, shapes, reader
        self._refs: dict[str, AdapterRef] = {}
        self._turn = asyncio.Lock()
        self.version = 0

    @property
    def refs(self) -> Mapping[str, AdapterRef]:
        return self._refs

    async def register(
        self, name: str, path: Path, *, replace: bool = False, loaded_unix_s: float = 0.0
    ) -> AdapterRef:
        """Read and check the adapter at ``path``, and know it as ``name``. The same content again is fine.

        Raises AdapterRefused, or AdapterNameTaken: the name has another content, and ``replace`` is False.
        After an error the name is as it was.
        """
        async with self._turn:
            if name not in self._refs and len(self._refs) >= MOST_ADAPTERS:
                raise AdapterRefused(path, f"the node has {MOST_ADAPTERS:,} adapters, the most: unload one")
            adapter = await asyncio.get_running_loop().run_in_executor(self._reader, self._read, path)
            known = self._refs.get(name)
            if known is not None and known.digest != adapter.digest and not replace:
                raise AdapterNameTaken(name, str(known.path))
            ref = AdapterRef(name, adapter.digest, path.resolve(), adapter.rank, loaded_unix_s)
            self._refs[name] = ref
            self.version += 1
            return ref

    def _read(self, path: Path) -> PeftAdapter:
        adapter = PeftAdapter(path, self._config)
        self._shapes.learn(adapter)
        return adapter

    def page(self, after: str, most: int) -> tuple[list[AdapterRef], bool]:
        """Return at most so many adapters with names after ``after``, and whether there are more."""
        names = sorted(name for name in self._refs if name > after)
        return [self._refs[name] for name in names[:most]], len(names) > most

    def remove(self, name: str) -> bool:
        """Forget a name. Requests that have begun keep its weights. Return False for an unknown one."""
        if self._refs.pop(name, None) is None:
            return False
        self.version += 1
        return True
