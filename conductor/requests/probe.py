"""A short request that tries one node."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np

from moonpool.conductor.errors import RequestFailed
from moonpool.conductor.observing.timelines.timeline import RequestTimeline
from moonpool.conductor.request import GenerateRequest, SamplingParams, TokenEvent

# Its prompt and its output, and its limit.
_TOKENS = 8
_LIMIT_S = 30.0


class Probe:
    """``generate`` and ``timeline``: of the conductor."""

    def __init__(
        self,
        generate: Callable[[GenerateRequest], AsyncGenerator[TokenEvent, None]],
        timeline: Callable[[str], RequestTimeline | None],
        vocab_size: int,
    ) -> None:
        self._generate = generate
        self._timeline = timeline
        self._vocab_size = vocab_size

    async def __call__(self, node_id: str) -> float:
        """Generate on ``node_id``, a node or its replicas; return the seconds it took.

        Raises ``ConductorError``: it failed, or ran elsewhere, because the node cannot be reached.
        """
        clock = asyncio.get_running_loop().time
        request = GenerateRequest(
            f"probe-{uuid.uuid4().hex}",
            np.arange(_TOKENS, dtype=np.int32) % self._vocab_size,
            SamplingParams(_TOKENS, temperature=0.0, ignore_eos=True),
            deadline_s=_LIMIT_S,
            only=node_id,
            follows=True,
        )
        began_s = clock()
        async with aclosing(self._generate(request)) as events:
            async for _ in events:
                pass
        took_s, timeline = clock() - began_s, self._timeline(request.request_id)
        summary = timeline.summary if timeline is not None else None
        used = (summary.prefill_node, summary.decode_node) if summary is not None else ()
        if not any(name == node_id or name.startswith(f"{node_id}.") for name in used):
            raise RequestFailed(f"it ran on {' and '.join(used)}", 1, _TOKENS)
        return took_s
