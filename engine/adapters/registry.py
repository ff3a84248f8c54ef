"""The adapters that a node knows by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.errors import AdapterNameTaken


class AdapterRegistry:
    """Names are unique; an adapter that is registered was read and checked once. On one event loop."""

    def __init__(self, config: ModelConfig, reader: ThreadPoolExecutor) -> None:
        """``reader``: where files are read."""
        self._config, self._reader = config, reader
        self._refs: dict[str, AdapterRef] = {}
        self._turn = asyncio.Lock()

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
            read = asyncio.get_running_loop().run_in_executor(self._reader, PeftAdapter, path, self._config)
            adapter = await read
            known = self._refs.get(name)
            if known is not None and known.digest != adapter.digest and not replace:
                raise AdapterNameTaken(name, str(known.path))
            ref = AdapterRef(name, adapter.digest, path.resolve(), adapter.rank, loaded_unix_s)
            self._refs[name] = ref
            return ref

    def remove(self, name: str) -> bool:
        """Forget a name. Requests that have begun keep its weights. Return False for an unknown one."""
        return self._refs.pop(name, None) is not None
