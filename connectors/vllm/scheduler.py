"""The half of the connector in vLLM's scheduler: what is loaded, what is saved."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from moonpool.connectors.service_thread import OnceAMinute
from moonpool.connectors.vllm.engine_request import EngineRequest
from moonpool.connectors.vllm.lookup.costs import LoadCosts, Source
from moonpool.connectors.vllm.lookup.prefix_index import Holder, PrefixIndex
from moonpool.connectors.vllm.lookup.reasons import SeenBlocks
from moonpool.connectors.vllm.parameters.hand_over import (
    HandOver,
    answer_of,
    gives,
    hand_over_of,
    source_of,
)
from moonpool.connectors.vllm.parameters.hints import HintedBlocks, at_end, hints_of, prefetch_of
from moonpool.connectors.vllm.parameters.tenant import tenant_of
from moonpool.connectors.vllm.plan import Claim, Load, PrefixReport, Save, StepPlan
from moonpool.connectors.vllm.tracked import Loading, Tracked
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.vllm_keys import key_of

log = logging.getLogger(__name__)

# After this many failed loads a request computes its prompt.
_MAX_LOADS = 2


class SchedulerSide:
    """``fingerprint``: of the layout, 16 bytes; ``block_size``: tokens; ``node_id``: of this engine."""

    def __init__(
        self,
        node_id: str,
        fingerprint: bytes,
        block_size: int,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_id = node_id
        self._layout = fingerprint
        self._fingerprint = fingerprint  # of the keys: after a reset other than the layout's
        self._block_size = block_size
        self._index = index
        self._clock = clock
        self._costs = LoadCosts(clock)
        self._seen = SeenBlocks(block_size, clock)
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._claims: list[Claim] = []
        self._hints: list[HintedBlocks] = []
        self._warnings = OnceAMinute(clock)
        self._step: tuple[float, int, set[str]] | None = None  # when, prompt tokens, requests

    # ------------------------------------------------------------------ hints

    def arrived(self, request: EngineRequest) -> None:
        """A request is here, and may wait for its turn. Fetch its prefix meanwhile if a hint asks for it."""
        known = self._track(request)
        known.hints = hints_of(request, lambda what: self._warnings.say(f"a hint was ignored: {what}"))
        if gives(request):
            # Its blocks are for another engine, which may drop them.
            known.hints = replace(known.hints, drop_from=None)
        if known.hints.prefetch:
            keys = self._keys(known)
            holders = self._index.holders(keys)
            self._hints += prefetch_of(request.request_id, keys, holders, self._node_id)

    # ------------------------------------------------------------------ loading

    def match(self, request: EngineRequest, num_computed_tokens: int) -> int:
        """How many tokens after ``num_computed_tokens`` should be loaded. Changes nothing but caches."""
        known = self._track(request)
        report = known.report
        skip = num_computed_tokens // self._block_size
        # Leave one token to compute: its logits give the next one.
        most = (request.num_prompt_tokens - 1) // self._block_size
        report.engine_tokens, report.reason, report.detail = num_computed_tokens, "", ""
        if num_computed_tokens % self._block_size:
            return 0
        if known.giver and (num_tokens := self._given(known, skip)):
            return num_tokens
        if most <= skip:
            return 0
        if known.num_loads >= _MAX_LOADS:
            report.reason = "failed"
            return 0
        source = self._source(known, self._keys(known)[:most], skip)
        if source is None:
            return 0
        end = min(source.num_blocks, most)
        num_tokens = (end - skip) * self._block_size
        known.loading = Loading(source, self._keys(known)[:end], skip, num_tokens, self._clock())
        return num_tokens

    def _given(self, known: Tracked, skip: int) -> int:
        """How many tokens to load of a prompt that another engine has computed; 0: it is not known."""
        address = self._index.address_of(known.giver)
        num_tokens = known.request.num_prompt_tokens - 1 - skip * self._block_size
        if not address:
            return 0
        given = self._hand_over(known)
        if given.tail is None:
            num_tokens = min(num_tokens, (len(given.keys) - skip) * self._block_size)
        source = Holder(known.giver, len(given.keys), address)
        known.loading = Loading(
            source, given.keys, skip, num_tokens, self._clock(), given.tail, is_given=True
        )
        return max(num_tokens, 0)

    def _hand_over(self, known: Tracked) -> HandOver:
        return hand_over_of(known.request, self._keys(known), self._fingerprint, self._block_size)

    def _source(self, known: Tracked, keys: list[BlockKey], skip: int) -> Holder | None:
        """Where to load more than ``skip`` blocks from; None: computing is faster, or no node has them.
        Reports why the rest is missing."""
        holders = [holder for holder in self._index.holders(keys) if holder.num_blocks > skip]
        # The longest prefix; of equals the one in this engine's own memory.
        holders.sort(key=lambda holder: (holder.num_blocks, holder.node_id == self._node_id), reverse=True)
        longest = holders[0].num_blocks if holders else skip
        self._seen.saw(keys[:longest])
        chosen = next((holder for holder in holders if self._is_worth(holder, skip)), None)
        if holders and (chosen is None or chosen.num_blocks < longest):
            known.report.reason, known.report.detail = "slower", holders[0].node_id
        elif longest < len(keys):
            known.report.reason, known.report.detail = self._why_missing(known, keys, longest)
        return chosen

    def _is_worth(self, holder: Holder, skip: int) -> bool:
        num_blocks = holder.num_blocks - skip
        return self._costs.is_worth(_source_of(holder), num_blocks, num_blocks * self._block_size)

    def _why_missing(self, known: Tracked, keys: list[BlockKey], missing: int) -> tuple[str, str]:
        """Why no node has ``keys[missing]``: one of ``REASONS``, and the node it speaks of."""
        if reason := self._seen.why_missing(keys[missing]):
            return reason, ""
        block_hash = known.request.block_hashes[missing]
        if node_id := self._index.in_other_layout(self._layout, lambda theirs: key_of(theirs, block_hash)):
            return "layout", node_id
        return (known.head if not missing and known.head else "new"), ""

    def allocated(self, request: EngineRequest, blocks: Sequence[int], num_external_tokens: int) -> None:
        """The engine gave the request ``blocks``, for ``num_external_tokens`` of what ``match`` found."""
        known = self._track(request)
        loading = known.loading
        # Its turn has come: what it loads need not be fetched.
        self._hints = [hint for hint in self._hints if not hint.is_prefetch_of(request.request_id)]
        if not num_external_tokens or loading is None:
            return
        skip, keys = loading.skip, loading.keys
        source = b"" if loading.source.node_id == self._node_id else loading.source.address
        tenant = known.tenant.name if known.tenant is not None else ""
        self._loads.append(
            Load(request.request_id, keys, list(blocks[skip : len(keys)]), source, loading.tail, tenant)
        )
        known.num_loads += 1
        if loading.is_given:
            known.giver = ""
        known.loading = replace(loading, since_s=self._clock())

    def ended(self, loaded: set[str], failed: set[str]) -> None:
        """Loads have ended; ``failed`` ones are in ``loaded`` too."""
        for request_id in loaded:
            known = self._tracked.get(request_id)
            if known is None or known.loading is None:
                continue
            loading, known.loading = known.loading, None
            report = known.report
            if request_id in failed:
                report.num_failed += 1
                log.info("request %s computes what %s did not give", request_id, loading.source.node_id)
                continue
            known.num_loads = 0
            seconds = self._clock() - loading.since_s
            self._costs.loaded(_source_of(loading.source), len(loading.keys) - loading.skip, seconds)
            is_own = loading.source.node_id == self._node_id
            report.source, report.load_s = loading.source.node_id, seconds
            report.tier = "peer" if not is_own else "ssd" if loading.source.num_on_disk else "host"
            report.loaded_tokens = loading.num_tokens

    # ------------------------------------------------------------------ saving

    def plan(
        self, num_scheduled: Mapping[str, int], blocks_of: Callable[[str], Sequence[int] | None]
    ) -> StepPlan:
        """The plan of a step of ``num_scheduled`` tokens by request."""
        self._observe(num_scheduled)
        plan = StepPlan(self._loads, claims=self._claims, hints=self._hints)
        self._loads, self._claims, self._hints = [], [], []
        for request_id, count in num_scheduled.items():
            known = self._tracked.get(request_id)
            if known is None:
                continue
            if not known.is_reported:
                known.is_reported = True
                plan.reports.append(replace(known.report))
            self._plan_saves(known, known.request.num_computed_tokens + count, blocks_of, plan)
        return plan

    def _plan_saves(
        self,
        known: Tracked,
        num_tokens: int,
        blocks_of: Callable[[str], Sequence[int] | None],
        plan: StepPlan,
    ) -> None:
        """The engine has KV of ``num_tokens`` after this step."""
        request, begin = known.request, known.num_saved
        # With speculation, vLLM adds places for guessed tokens to a step that computes a prompt's last one.
        is_due = gives(request) and not known.given and num_tokens >= request.num_prompt_tokens
        # The partial block comes after the prompt's full ones: those of an answer are saved in the next step.
        num_full = (request.num_prompt_tokens if is_due else num_tokens) // self._block_size
        keys = self._keys(known)[:num_full]
        keys = keys[: known.hints.first_dropped(self._block_size)]
        given = self._hand_over(known) if is_due else HandOver([], None)
        new = keys[begin:] if given.tail is None else [*keys[begin:], given.tail]
        if new:
            blocks = blocks_of(request.request_id)
            if blocks is None:
                return
            known.num_saved = len(keys)
            self._seen.saw(keys[begin:])
            parent = keys[begin - 1] if begin else None
            # What is handed over is kept for seconds: no quota limits it.
            tenant = known.tenant.name if known.tenant is not None and not gives(request) else ""
            plan.saves.append(Save(new, list(blocks[begin : begin + len(new)]), parent, tenant))
        if given.keys:
            known.given = True
            plan.keeps.append(given)

    def _observe(self, num_scheduled: Mapping[str, int]) -> None:
        """Learn what prompt tokens cost from the time between two steps of a request."""
        now_s = self._clock()
        if self._step is not None:
            began_s, num_tokens, requests = self._step
            if requests & num_scheduled.keys():
                self._costs.computed(num_tokens, now_s - began_s)
        prompts = sum(count for count in num_scheduled.values() if count > 1)
        self._step = (now_s, prompts, set(num_scheduled)) if num_scheduled else None

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """Return what the engine that decodes it must be sent; None: nothing is kept for one.

        A load that is under way goes on: the engine keeps the blocks until it has ended.
        """
        known = self._tracked.pop(request_id, None)
        if known is not None:
            keys = self._keys(known)
            self._hints += at_end(known.hints, request_id, keys, known.num_saved, self._block_size)
        return answer_of(self._node_id) if known is not None and known.given else None

    def reset_cache(self) -> None:
        """Load nothing that any engine has kept so far: the weights may have changed.

        From now on this engine's keys contain a secret, so it shares blocks with no other engine, and after
        the next reset not with itself. What it has kept stays until it is evicted.
        """
        self._fingerprint = blake2b(self._layout + os.urandom(16), digest_size=16).digest()
        for known in self._tracked.values():
            known.keys, known.num_saved, known.giver, known.given = [], 0, "", False
        self._claims = [
            Claim(known.tenant, list(self._keys(known)))
            for known in self._tracked.values()
            if known.tenant is not None
        ]
        log.warning("the cache was reset: until its restart this engine shares no KV blocks with others")

    def close(self) -> None:
        self._index.close()

    # ------------------------------------------------------------------ keys

    def _track(self, request: EngineRequest) -> Tracked:
        known = self._tracked.get(request.request_id)
        if known is None:
            report = PrefixReport(request.request_id, request.num_prompt_tokens)
            known = Tracked(request, report, self._seen.head(request), giver=source_of(request))
            self._tracked[request.request_id] = known
            if (tenant := tenant_of(request)) is not None and (keys := self._keys(known)):
                known.tenant = tenant
                self._claims.append(Claim(tenant, list(keys)))
        return known

    def _keys(self, known: Tracked) -> list[BlockKey]:
        """The keys of its full blocks. vLLM's hashes are chained, and contain adapter, images and salt."""
        for block_hash in known.request.block_hashes[len(known.keys) :]:
            known.keys.append(key_of(self._fingerprint, block_hash))
        return known.keys


def _source_of(holder: Holder) -> Source:
    return Source(holder.node_id, holder.num_on_disk > 0)
