"""vLLM servers named in the configuration: they are not in the index, so a conductor asks them itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.kvstore.blocks.vllm_keys import HASH_ALGORITHM, VllmChain
from moonpool.kvstore.index.redis.engine_facts import VLLM, EngineFacts
from moonpool.kvstore.index.redis.node_record import ROLES, STAGES, NodeRecord
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.service.vital import cancel_and_wait

log = logging.getLogger(__name__)

_ASK_EVERY_S = 2.0
_ANSWER_S = 5.0
# None of its blocks is in the index: the keys only have to be computable.
_NONE_HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class EngineEntry:
    url: str
    role: str = "both"
    model: str = ""  # that it must serve; empty: any

    @property
    def node_id(self) -> str:
        return f"engine-{urlsplit(self.url).netloc}"

    @classmethod
    def parse(cls, text: str) -> EngineEntry:
        """Read ``URL [role=ROLE] [model=NAME]``. Raises ``ConfigError``."""
        url, *facts = text.split()
        given = dict(fact.partition("=")[::2] for fact in facts)
        parts = urlsplit(url)
        role = given.get("role", "both")
        if parts.scheme not in ("http", "https") or not parts.netloc or role not in ROLES:
            raise _wrong(text)
        if given.keys() - {"role", "model"} or not all(given.values()):
            raise _wrong(text)
        return cls(url.rstrip("/").removesuffix("/v1"), role, given.get("model", ""))


def _wrong(text: str) -> ConfigError:
    roles = ", ".join(ROLES)
    return ConfigError(
        f"conductor.engines: {text!r} is not URL [role=ROLE] [model=NAME], with a role of {roles}",
        "conductor.engines",
    )


class ConfiguredEngines:
    """Asks each engine what it serves until it answers, and then hands its record to ``join``, once."""

    def __init__(
        self, entries: Sequence[str], model: ServedModel, key: str, join: Callable[[NodeRecord], None]
    ) -> None:
        """``key``: their ``--api-key``; empty: none. Raises ``ConfigError``."""
        self._entries = [EngineEntry.parse(text) for text in entries if text.strip()]
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._join = join
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for entry in self._entries:
            self._tasks.append(asyncio.create_task(self._seek(entry), name=f"ask {entry.node_id}"))

    async def close(self) -> None:
        """Idempotent."""
        await cancel_and_wait(*self._tasks)

    async def _seek(self, entry: EngineEntry) -> None:
        said = ""
        limits = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=limits) as session:
            while True:
                try:
                    max_model_len = await self._ask(session, entry)
                    break
                except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                    if str(error) != said:
                        said = str(error)
                        log.warning("engine %s of conductor.engines is not used yet: %s", entry.url, said)
                await asyncio.sleep(_ASK_EVERY_S)
        self._join(self._record(entry, max_model_len))

    async def _ask(self, session: aiohttp.ClientSession, entry: EngineEntry) -> int:
        """Return the most tokens that it serves. Raises if it does not answer, or serves another model."""
        async with session.get(f"{entry.url}/v1/models") as response:
            response.raise_for_status()
            served = (await response.json())["data"]
        wanted = next((one for one in served if entry.model in ("", one["id"])), None)
        if wanted is None:
            names = ", ".join(str(one["id"]) for one in served)
            raise ValueError(f"it serves {names}, not {entry.model}")
        return int(wanted.get("max_model_len") or self._model.max_model_len)

    def _record(self, entry: EngineEntry, max_model_len: int) -> NodeRecord:
        model = self._model
        fingerprint = blake2b(f"{model.name} {model.block_size}".encode(), digest_size=16).digest()
        block = np.arange(model.block_size, dtype=np.int32)
        [probe], _ = VllmChain(fingerprint, _NONE_HASH).extend(block, model.block_size, None)
        facts = EngineFacts(
            VLLM,
            entry.url,
            block_size=model.block_size,
            block_nbytes=next(iter(model.layouts().values())).block_nbytes,
            fingerprint=fingerprint.hex(),
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            hash_algorithm=HASH_ALGORITHM,
            none_hash=_NONE_HASH.hex(),
            probe=probe.hex(),
        )
        return NodeRecord(
            entry.node_id,
            time.time_ns(),
            entry.role,
            stages=STAGES,
            model=f"{model.name}@configured",
            layout=facts.fingerprint,
            rpc_address=urlsplit(entry.url).netloc,
            extra=facts.add_to({}),
        )
