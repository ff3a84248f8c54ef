"""The half of the connector in vLLM's worker: copies between the engine's memory and the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from moonpool.connectors.errors import NodeFailed
from moonpool.connectors.service_thread import OnceAMinute
from moonpool.connectors.vllm.engine_node import EngineNode
from moonpool.connectors.vllm.node_thread import NodeThread
from moonpool.connectors.vllm.pages import PageReading, Pages
from moonpool.connectors.vllm.parameters.hand_over import HandOver
from moonpool.connectors.vllm.parameters.hints import HintedBlocks
from moonpool.connectors.vllm.plan import Outcome, Save, StepPlan
from moonpool.connectors.vllm.registration import Registration
from moonpool.connectors.vllm.request_log import HINTS, LOADS, UNSAVED, RequestLog
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import NodeUnavailable, RemoteError
from moonpool.transfer.errors import ChecksumMismatch, TransferError

Result = TypeVar("Result")

# Longest that the engine's start waits for the node.
_START_S = 30.0
# Longest that a step waits for the copies of the blocks before it, of which a block takes microseconds.
_FENCE_S = 5.0
_NO_FACTS: Mapping[str, str] = MappingProxyType({})
# How a load ended, for the metrics.
_ENDS = {
    BlockMissing: "missing",
    BlockCorrupt: "corrupt",
    ChecksumMismatch: "corrupt",
    NodeUnavailable: "unreachable",
    RemoteError: "unreachable",
    TransferError: "unreachable",
}


class WorkerSide:
    """Called by the engine's worker thread. Neither method raises for what happens in the store."""

    def __init__(
        self,
        config: Config,
        fingerprint: bytes,
        facts: Mapping[str, str] = _NO_FACTS,
        clock: Callable[[], float] = time.monotonic,
        *,
        registration: Registration | None = None,
    ) -> None:
        """``facts``: what ``fingerprint`` stands for. ``registration``: with conductors; None: they send no
        requests."""
        self._registration = registration
        self._config = config
        self._fingerprint = fingerprint
        self._facts = facts
        self._requests = RequestLog()
        self._clock = clock
        self._warnings = OnceAMinute(clock)
        self._node: NodeThread | None = None
        self._readings: list[PageReading] = []
        self._loads: dict[str, Future[None] | None] = {}

    def register(self, caches: Mapping[str, Tensor]) -> None:
        """The engine has allocated its KV memory. Raises ``Unsupported``."""
        pages = Pages(caches)
        layout = OpaqueLayout(pages.block_nbytes, self._fingerprint)
        self._node = NodeThread(
            lambda: EngineNode(self._config, layout, pages, self._facts, self._requests, self._registration)
        )
        self._node.wait_started(_START_S)

    def begin_loads(self, plan: StepPlan) -> None:
        for report in plan.reports:
            self._requests.add(report)
        # Blocks that are loaded or saved belong to their tenant from the beginning.
        for claim in plan.claims:
            self._submit(partial(EngineNode.claim, claim=claim))
        for load in plan.loads:
            self._loads[load.request_id] = self._submit(partial(EngineNode.load, load=load))
        for hint in plan.hints:
            self._begin_hint(hint)

    def _submit(self, call: Callable[[EngineNode], Coroutine[Any, Any, Result]]) -> Future[Result] | None:
        return None if self._node is None else self._node.submit(call)

    def _begin_hint(self, hint: HintedBlocks) -> None:
        doing = self._submit(partial(EngineNode.hint, hint=hint))
        if doing is not None:
            doing.add_done_callback(partial(self._hinted, hint.action))

    def _hinted(self, action: str, doing: Future[str]) -> None:
        if doing.cancelled():
            return
        error = doing.exception()
        HINTS.labels(action, "failed" if error is not None else doing.result()).inc()
        if error is not None:
            self._warnings.say(f"a hint to {action} was not followed: {error}")

    def begin_saves(self, plan: StepPlan) -> None:
        """The step's blocks are computed: begin to copy them. ``fence`` waits until they may change."""
        for save in plan.saves:
            self._begin_save(save)
        for given in plan.keeps:
            self._begin_keep(given)

    def _begin_keep(self, given: HandOver) -> None:
        keeping = self._submit(partial(EngineNode.keep, given=given))
        if keeping is not None:
            keeping.add_done_callback(self._kept)

    def _kept(self, keeping: Future[None]) -> None:
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            self._warnings.say(f"a prompt was not kept for another engine: {error}")

    def _begin_save(self, save: Save) -> None:
        reading = PageReading()
        saving = self._submit(partial(EngineNode.save, save=save, reading=reading))
        if saving is None:
            self._not_saved("the store does not run")
            return
        saving.add_done_callback(partial(self._saved, reading))
        self._readings.append(reading)

    def _saved(self, reading: PageReading, saving: Future[None]) -> None:
        reading.end()
        if not saving.cancelled() and (error := saving.exception()) is not None:
            self._not_saved(str(error))

    def _not_saved(self, why: str) -> None:
        UNSAVED.inc()
        self._warnings.say(f"blocks were not kept: {why}")

    def fence(self) -> None:
        """Wait until no page is read any more that the engine may overwrite in its next step; after
        ``_FENCE_S`` what is still being read is not kept."""
        readings, self._readings = self._readings, []
        until_s = self._clock() + _FENCE_S
        for reading in readings:
            if not reading.wait(max(until_s - self._clock(), 0)):
                self._not_saved(f"copying them took more than {_FENCE_S:g} s")

    def ended_loads(self) -> Outcome:
        """The loads that have ended since the last call."""
        outcome = Outcome()
        for request_id, loading in list(self._loads.items()):
            if loading is not None and not loading.done():
                continue
            del self._loads[request_id]
            outcome.loaded.add(request_id)
            error = self._error_of(loading)
            LOADS.labels(_end_of(error)).inc()
            if error:
                outcome.failed.add(request_id)
                self._warnings.say(f"a prefix was not loaded and is computed: {error}")
        return outcome

    @staticmethod
    def _error_of(loading: Future[None] | None) -> BaseException | None:
        if loading is None or loading.cancelled():
            return NodeFailed("the store does not run")
        return loading.exception()

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
            self._node = None


def _end_of(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return next((end for kind, end in _ENDS.items() if isinstance(error, kind)), "error")
