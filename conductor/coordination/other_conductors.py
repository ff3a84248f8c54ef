"""The other conductors of the cluster: what they say of themselves, and where that does not go with us."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.conductor.coordination.announcements import Announcements
from moonpool.kvstore.errors import IndexUnavailable

log = logging.getLogger(__name__)

_TELL_EVERY_S = 5.0
# Facts that make keys of blocks: where they differ, one finds nothing of what the other's requests left.
KEY_FACTS = {
    "tokenizer": "another tokenizer (tokenizer.json): the same prompt becomes other tokens",
    "chat_template": "another chat template: the same conversation becomes another prompt",
    "block_size": "another engine.block_size: the same prompt is cut into other blocks",
    "model": "another model: nothing is shared",
}


class OtherConductors:
    """``facts`` are ours; set them before ``start``. ``others`` are as they told last, by conductor id."""

    def __init__(self, facts: Announcements) -> None:
        self.facts: dict[str, Any] = {}
        self.others: Mapping[str, Mapping[str, Any]] = {}
        self._facts = facts
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="neighbours")

    async def close(self) -> None:
        """Idempotent. What we told goes with our lease."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def differences(self) -> Iterator[str]:
        """A sentence for each fact of each other conductor that is not as ours."""
        for name, theirs in sorted(self.others.items()):
            for fact, means in KEY_FACTS.items():
                if fact in theirs and theirs[fact] != self.facts.get(fact):
                    yield (
                        f"{name} at {theirs.get('url', 'an unknown address')} has {means}, so that what it "
                        f"caches is not found here ({theirs[fact]} there, {self.facts.get(fact)} here)"
                    )

    async def _run(self) -> None:
        said: set[str] = set()
        while True:
            try:
                self.others = await self._facts.tell(self.facts)
            except IndexUnavailable as error:
                log.debug("other conductors are not told of us: %s", error)
            for sentence in set(self.differences()) - said:
                log.warning("%s", sentence)
                said.add(sentence)
            await asyncio.sleep(_TELL_EVERY_S)
