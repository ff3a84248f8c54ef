"""The prefill node's service: fetch cached blocks, compute the rest, hand the blocks over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager

from moonpool.engine.batching.sequence import FinishReason, Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.errors import DuplicateSequence
from moonpool.engine.node.handover import Handover, HandoverFailed
from moonpool.engine.node.messages import sequence_of, time_left_s, token_logprobs
from moonpool.engine.node.metrics import PromptTokens
from moonpool.engine.node.node import EngineNode, Key
from moonpool.engine.node.service import RpcContext, node_servicers
from moonpool.engine.prefix_cache.peer_exchange import Fetched, PeerIncompatible
from moonpool.engine.prefix_cache.store import USE_DELAY_S
from moonpool.engine.prefix_cache.tier_loader import Loaded
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction.reuse_distance import ReuseDistance
from moonpool.kvstore.index import metrics as index_metrics
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import LifeEnded, MoonpoolError, NodeUnavailable, RemoteError, failure_of
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.observing import tracing
from moonpool.runtime.service.vital import vital
from moonpool.runtime.structure.grammars import StructureInvalid
from moonpool.transfer import TransferError

log = logging.getLogger(__name__)


class PrefillFailed(MoonpoolError):
    """The engine could not compute this prompt. All its blocks are released."""

    failure = FailureClass.WORKER


def _failure(event: StepEvent) -> MoonpoolError:
    """Return the error of a sequence that ended without its first token."""
    if event.ended_life:
        return LifeEnded(event.error, event.lost)
    automaton = event.sequence.automaton
    if automaton is not None and automaton.error:
        return StructureInvalid(automaton.error)
    return PrefillFailed(event.error or "the prefill was cancelled")


def stale_seconds(chunks: Iterable[tuple[float, float, int]], num_stale_tokens: int) -> float:
    """Seconds of a prompt's steps that computed its first ``num_stale_tokens`` uncached tokens, by the share
    of their rows. ``chunks``: ``Sequence.chunks``."""
    seconds = 0.0
    for began_s, ended_s, num_tokens in chunks:
        num_stale = min(num_stale_tokens, num_tokens)
        seconds += (ended_s - began_s) * num_stale / max(num_tokens, 1)
        num_stale_tokens -= num_stale
    return seconds


class PrefillNode(EngineNode, node_pb2_grpc.PrefillNodeServicer):
    """Serves ``protos.PrefillNode``."""

    role = "prefill"
    stages: tuple[str, ...] = ("prefill",)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._prefills: set[Key] = set()  # calls in progress, those that gather blocks included
        self._first_tokens: dict[Key, asyncio.Future[StepEvent]] = {}
        self._handovers: dict[Key, Handover] = {}
        self._handing_over: set[asyncio.Task[None]] = set()
        self._prompts = PromptTokens(self.tenant_labels)
        self._reuse = ReuseDistance(index_metrics.reuse_distance, index_metrics.reuse_first_uses)

    # ------------------------------------------------------------------ EngineNode

    def servicers(self) -> list[rpc.Servicer]:
        self.engine.on_step = self.on_prefills
        return [*node_servicers(self), (node_pb2_grpc.add_PrefillNodeServicer_to_server, self)]

    def num_requests(self) -> int:
        return len(self._prefills) + len(self._handing_over)

    async def stop(self) -> None:
        for handover in self._handovers.values():
            handover.fail(HandoverFailed(f"node {self.node_id} is stopping", FailureClass.NODE))
        for task in list(self._handing_over):
            task.cancel()

    def restart(self) -> None:
        super().restart()
        self._first_tokens.clear()
        self._handovers.clear()

    def sweep(self) -> None:
        for handover in self._handovers.values():
            handover.renew()
        super().sweep()

    def cancel(self, key: Key) -> None:
        """End a handover after the first token. Before that the call itself is cancelled."""
        handover = self._handovers.get(key)
        if handover is not None and key not in self._prefills:
            handover.fail(HandoverFailed("the request was cancelled", FailureClass.REQUEST))
            handover.followed.set()
            handover.taken.set()

    # ------------------------------------------------------------------ service PrefillNode

    async def Prefill(self, request: node_pb2.PrefillRequest, context: RpcContext) -> node_pb2.PrefillReply:
        self.check_takes_work()
        received_s = time.monotonic()
        sequence = sequence_of(request.work, arrived_s=received_s, prompt_logprobs=request.prompt_logprobs)
        self.tenants.charge(request.work, sequence.keys, self.store.tiers)
        loaded, fetched, fetch_error = Loaded(), Fetched(), ""
        if sequence.key in self._prefills:
            raise DuplicateSequence(*sequence.key)
        handover = self._handover(sequence.key) if request.followed else None
        self._prefills.add(sequence.key)
        try:
            await self.prepare(sequence)
            async with self.with_adapter(request.work, sequence) as adapter:
                if not request.prompt_logprobs:
                    loaded, fetched, fetch_error = await self._gather(request, sequence)
                if adapter is not None:
                    await adapter.give(sequence)
                event = await self._compute(sequence)
        except BaseException as error:
            self._abort(sequence, error)
            raise
        finally:
            self._prefills.discard(sequence.key)
        token = self.work_time.tell(event)
        if handover is None:
            self.engine.release(sequence)
        else:
            handover.finish(sequence, token)
            self._keep_until_taken(sequence, handover, request.work)
        named = max(request.num_hit_blocks, request.num_fetch_blocks)
        return self._reply(sequence, event, token, loaded, fetched, fetch_error, received_s, named)

    async def Follow(
        self, request: node_pb2.FollowRequest, context: RpcContext
    ) -> AsyncIterator[node_pb2.KvChunk]:
        with self._followed((request.request_id, request.attempt)) as handover:
            async with aclosing(handover.chunks(request.follower)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def prefilled_here(self, sequence: Sequence) -> node_pb2.TokenOut:
        """Wait until the prompt of this request is computed on this node, and move its blocks to
        ``sequence``. Returns the first token.

        Raises HandoverFailed, or the error of the prefill; ``sequence`` has no blocks then.
        """
        with self._followed(sequence.key) as handover:
            prefilled, token = await handover.finished()
            self.engine.take_prefilled(sequence, prefilled)
            return token

    @contextmanager
    def _followed(self, key: Key) -> Iterator[Handover]:
        """The handover of a request, which is taken at the end of the block."""
        handover = self._handover(key)
        handover.followed.set()
        try:
            yield handover
        finally:
            handover.taken.set()
            if key not in self._prefills:
                self._handovers.pop(key, None)

    # ------------------------------------------------------------------ the work

    async def _gather(
        self, request: node_pb2.PrefillRequest, sequence: Sequence
    ) -> tuple[Loaded, Fetched, str]:
        """Load the sequence's prefix from the local tiers and from a peer. Failures are no errors: missing
        blocks are computed."""
        pool = self.engine.pool
        # Leave one token uncached: prefill needs a query row to produce logits.
        num_blocks = (sequence.num_tokens - 1) // pool.block_size
        sequence.hash_blocks(pool.block_size, num_blocks)
        chain = sequence.keys[:num_blocks]
        if self.events is not None:
            self.events.describe(chain, sequence.token_ids)
        self._reuse.use(chain)
        tiers = self.store.tiers.match(chain)
        # The policies learn of it later, while the prompt is computed.
        asyncio.get_running_loop().call_later(USE_DELAY_S, self.store.tiers.use, chain, tiers)
        # A fetch allocates blocks itself and does not wait for room.
        waits = not request.num_fetch_blocks and self.store.loader.lacks_room(chain, tiers)
        with tracing.span("load blocks", num_blocks=len(chain), waits=waits):
            if waits:
                loaded = await self._load_when_room(sequence, chain)
            else:
                loaded = await self.store.loader.load(chain, tiers)
                sequence.set_prefix(loaded.block_ids, pool.block_size)
        missing = chain[len(tiers) : request.num_hit_blocks]
        if missing:
            index_metrics.stale_hits.labels("local").inc(len(missing))
            self.publisher.retract(missing)
        loaded.num_stale = len(missing)
        if not request.num_fetch_blocks:
            return loaded, Fetched(), ""
        wanted = chain[: request.num_fetch_blocks]
        try:
            fetched = await self.exchange.fetch(request.fetch_from, wanted)
        except (TransferError, NodeUnavailable, RemoteError, PeerIncompatible) as error:
            log.warning("blocks were not fetched and will be computed: %s", error)
            return loaded, Fetched(), str(error)
        fetch_error = ""
        if fetched.num_missing:
            index_metrics.stale_hits.labels("peer").inc(fetched.num_missing)
            fetch_error = (
                f"{request.fetch_from.node_id} lacked {fetched.num_missing} of {len(wanted)} blocks "
                "that the index named"
            )
        if len(fetched.block_ids) > len(loaded.block_ids):
            pool.release(loaded.block_ids)
            sequence.set_prefix(fetched.block_ids, pool.block_size)
        else:
            pool.release(fetched.block_ids)
        return loaded, fetched, fetch_error

    async def _load_when_room(self, sequence: Sequence, chain: list[BlockKey]) -> Loaded:
        """Load the prefix after waiting for room in the pool. Meanwhile blocks on disk are prefetched to
        host memory."""
        prefetch = asyncio.create_task(self.store.tiers.prefetch(chain), name="prefetch")
        try:
            await self.engine.reserved(sequence)
            await prefetch
        finally:
            prefetch.cancel()
        loaded = await self.store.loader.fill(chain, sequence)
        num_tokens = (loaded.num_host + loaded.num_ssd) * self.engine.pool.block_size
        self.engine.seal_received(sequence, sequence.num_computed_tokens + num_tokens)
        # A prompt of full blocks may be in the pool by now as a whole: its last block is computed again.
        num_usable = len(chain) * self.engine.pool.block_size
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, num_usable)
        return loaded

    async def _compute(self, sequence: Sequence) -> StepEvent:
        """Queue the sequence and wait for its first token."""
        first_token: asyncio.Future[StepEvent] = asyncio.get_running_loop().create_future()
        try:
            self.engine.add(sequence, prefill_only=True)
            self._first_tokens[sequence.key] = first_token
            return await first_token
        finally:
            self._first_tokens.pop(sequence.key, None)

    def on_prefills(self, events: list[StepEvent]) -> None:
        """A step has advanced these ``prefill_only`` sequences."""
        for event in events:
            sequence = event.sequence
            failed = event.ended_life or event.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)
            if event.token_id >= 0 or failed:
                first_token = self._first_tokens.get(sequence.key)
                if first_token is None or first_token.done():
                    continue  # its call was cancelled, and so was the sequence
                if event.token_id >= 0:
                    first_token.set_result(event)
                else:
                    first_token.set_exception(_failure(event))
            elif (handover := self._handovers.get(sequence.key)) is not None and not event.preempted:
                handover.progress(sequence, event.num_computed_tokens)

    def _abort(self, sequence: Sequence, error: BaseException) -> None:
        self.engine.cancel(*sequence.key)
        self.engine.release(sequence)
        handover = self._handovers.pop(sequence.key, None)
        if handover is not None:
            # The conductor may hear of it from the follower first.
            if not isinstance(error, LifeEnded):
                error = HandoverFailed(str(error) or type(error).__name__, failure_of(error))
            handover.fail(error)

    def _handover(self, key: Key) -> Handover:
        handover = self._handovers.get(key)
        if handover is None:
            handover = self._handovers[key] = Handover(
                self.memory, self.kv_address, self.store.tiers.grants, ttl_s=self.config.store.lease_ttl_s
            )
        return handover

    def _keep_until_taken(self, sequence: Sequence, handover: Handover, work: node_pb2.Work) -> None:
        """Release the sequence's blocks when they were taken, or at the request's deadline."""

        async def keep() -> None:
            known_s = 0.0
            try:
                async with asyncio.timeout(self.config.store.lease_ttl_s):
                    await handover.followed.wait()
                async with asyncio.timeout(time_left_s(work, sequence.arrived_s)):
                    await handover.taken.wait()
            except TimeoutError:
                log.warning("no decode node took the blocks of %s in time", sequence.request_id)
                handover.fail(HandoverFailed("its blocks were not taken in time"))
                # A follower that comes later must not wait for this prompt until its deadline.
                known_s = time_left_s(work, sequence.arrived_s) or self.config.store.lease_ttl_s
            finally:
                asyncio.get_running_loop().call_later(known_s, self._handovers.pop, sequence.key, None)
                self.engine.release(sequence)

        task = vital(keep(), f"handover of {sequence.request_id}")
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    def _reply(
        self,
        sequence: Sequence,
        event: StepEvent,
        token: node_pb2.TokenOut,
        loaded: Loaded,
        fetched: Fetched,
        fetch_error: str,
        received_s: float,
        num_named: int,
    ) -> node_pb2.PrefillReply:
        """``num_named``: leading blocks that the index named, here or on the peer."""
        now_s = time.monotonic()
        num_cached, block_size = sequence.num_cached_tokens, self.engine.pool.block_size
        num_fetched = min(fetched.num_read * block_size, num_cached)
        num_ssd = min(loaded.num_ssd * block_size, num_cached - num_fetched)
        num_host = min(loaded.num_host * block_size, num_cached - num_fetched - num_ssd)
        num_pool = num_cached - num_fetched - num_ssd - num_host
        num_stale = loaded.num_stale + fetched.num_missing
        # Some of those that one node lacked came from the other one.
        num_stale_tokens = min(num_stale * block_size, max(num_named * block_size - num_cached, 0))
        chunks = []
        for began_s, ended_s, num_tokens in sequence.chunks:
            ago_s, took_s = now_s - began_s, ended_s - began_s
            tracing.record_span("compute chunk", ago_s=ago_s, seconds=took_s, num_tokens=num_tokens)
            chunks.append(node_pb2.Stretch(ago_s=ago_s, seconds=took_s, num_tokens=num_tokens))
        by_source = {
            "computed": sequence.num_tokens - 1 - num_cached,
            "pool": num_pool,
            "host": num_host,
            "ssd": num_ssd,
            "fetched": num_fetched,
        }
        self._prompts.count(sequence.tenant, by_source)
        return node_pb2.PrefillReply(
            token=token,
            num_cached_tokens=num_cached,
            num_pool_tokens=num_pool,
            num_host_tokens=num_host,
            num_ssd_tokens=num_ssd,
            num_fetched_tokens=num_fetched,
            queued_s=sequence.scheduled_s - received_s - loaded.seconds - fetched.seconds,
            load_s=loaded.seconds,
            fetch_s=fetched.seconds,
            compute_s=sequence.computed_s - sequence.scheduled_s,
            fetched_nbytes=fetched.nbytes,
            prompt_logprobs=[token_logprobs(entry) for entry in event.prompt_logprobs or ()],
            fetch_error=fetch_error,
            num_stale_blocks=num_stale,
            disk_s=loaded.disk_s,
            stale_s=stale_seconds(sequence.chunks, num_stale_tokens),
            chunks=chunks,
        )
