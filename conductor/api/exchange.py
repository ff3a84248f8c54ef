"""Generation requests over HTTP, for both APIs: parse, tokenize, run, answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web

from moonpool.conductor.access.gate import PRINCIPAL
from moonpool.conductor.admission.tenants import BATCH, Tenant
from moonpool.conductor.api.answer import Answer, Outcome, Usage
from moonpool.conductor.api.choice import Choice, Delta
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.errors import bad_request, name_of
from moonpool.conductor.api.models.cascade import Draft
from moonpool.conductor.api.models.lanes import LANES
from moonpool.conductor.api.models.tiers import Tiers
from moonpool.conductor.api.prompts import Prompt, output_limit
from moonpool.conductor.api.request_body import read_object, validated
from moonpool.conductor.api.schemas import CompletionBody, GenerationBody
from moonpool.conductor.api.sequence_runs import SequenceRun, Sink, run_all
from moonpool.conductor.api.streams.heartbeats import Heartbeats
from moonpool.conductor.api.streams.resume import Resumable, resumable
from moonpool.conductor.api.streams.streaming import EventStream, error_event, new_stream
from moonpool.conductor.api.structure.tool_use import tool_at_fault
from moonpool.conductor.api.transcript import transcribed
from moonpool.conductor.cells.prefixes import prefix_digests
from moonpool.conductor.cells.shares import limited
from moonpool.conductor.observing.recent_requests import RequestRecord
from moonpool.conductor.request import GenerateRequest
from moonpool.conductor.requests.conversation_records import Messages
from moonpool.conductor.tools.use import ToolUse
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.number_checks import DURATION_S
from moonpool.runtime.observing import audit, tracing
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.structure.grammars import Structure, StructureInvalid, StructureUnsupported

REQUEST_ID_HEADER = "x-request-id"
REGION_HEADER = "x-moonpool-region"  # where the request comes from
# Latency targets of the request in milliseconds, named as llm-d names them.
TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
EXPLAIN_HEADER = "x-moonpool-explain"  # 1: the answer includes the placements and their reasons
REQUEST_ID = web.RequestKey("request_id", str)

MAX_SEQUENCES = 4096  # prompts times n

Translation = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
B = TypeVar("B", bound=GenerationBody)
T = TypeVar("T")


class GenerationExchange:
    """The stages of one request, timed in its record and in metrics."""

    def __init__(self, http: web.Request, context: ApiContext, kind: type[Answer]) -> None:
        self._http = http
        self._lanes = http.app[LANES]
        self._context = context  # from ``parse`` on, that of the model asked for
        self._kind = kind
        self._arrived_s = context.clock()
        client_id = http[REQUEST_ID]
        # A client may reuse an id; ids in the core must be unique.
        unique = f"{client_id}-{context.new_id()[:8]}" if REQUEST_ID_HEADER in http.headers else client_id
        self._id = kind.id_prefix + unique
        self._explains = False
        # From ``parse`` on, those of the model or route asked for.
        self._tiers = Tiers([], context.conductor.model.name)
        self._failure: Exception | None = None  # of a model, also where a stream told it to the client
        self._draft: Draft | None = None  # of the model whose turn it is
        self._beats: Heartbeats | None = None
        self._adapter: node_pb2.Adapter | None = None
        self._digests: tuple[int, ...] = ()
        request_id.set(self._id)
        self._client = limited(http[PRINCIPAL].client, http.headers)
        self.record = RequestRecord(
            self._id,
            client_id,
            http.path,
            stream=False,
            received_unix_s=context.unix_clock(),
            tenant=self._client.name,
        )
        self._runs: list[SequenceRun] = []
        self._span = tracing.server_span(http.path, http.headers.get(tracing.TRACEPARENT, ""), root=True)

    def __enter__(self) -> GenerationExchange:
        self._context.recent.add(self.record)
        self._span.__enter__().set_attribute("moonpool.request_id", self._id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the record."""
        record, usage = self.record, usage_of(self._runs)
        before = sum(len(run.request.output_ids) for run in self._runs)  # another conductor counted them
        if isinstance(error, Exception):
            record.status = name_of(error)
        elif record.status == "running":
            record.status = "cancelled"
        record.e2e_s = self._context.clock() - self._arrived_s
        record.cached_tokens, record.output_tokens = (
            usage.cached_tokens,
            max(usage.completion_tokens - before, 0),
        )
        for run in self._runs:
            for part, seconds in run.request.delivery.total_s.items():
                record.delivered_s[part] = record.delivered_s.get(part, 0.0) + seconds
        for part, seconds in record.delivered_s.items():
            self._context.metrics.stage.labels(part).observe(seconds)
        record.see(self._context.conductor.timeline)
        audit.usage(
            request_id=record.id,
            tenant=self._client.name,
            model=self._tiers.model,
            endpoint=record.endpoint,
            outcome=record.status,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            seconds=round(record.e2e_s, 4),
        )
        if self._client.name:
            tokens = {
                "prompt": usage.prompt_tokens,
                "cached": usage.cached_tokens,
                "output": record.output_tokens,
            }
            failed = isinstance(error, Exception) and not usage.completion_tokens
            self._context.metrics.of_tenant(self._client.name, record.status, {} if failed else tokens)
        clocks = [run.clock for run in self._runs if run.clock is not None and run.clock.num_tokens]
        if clocks:
            record.ttft_s = min(clock.first_s for clock in clocks) - self._arrived_s
        gaps = sum(clock.num_tokens - 1 for clock in clocks)
        if gaps:
            record.tpot_s = sum(clock.last_s - clock.first_s for clock in clocks) / gaps
        if self._tiers.trial is not None:
            self._tiers.trial.ended(record, error if isinstance(error, Exception) else self._failure)
        self._span.__exit__(kind, error, trace)

    async def parse(self, schema: type[B], translate: Translation | None = None) -> B:
        """The validated body; ``translate``: what to validate instead of what was sent.

        Raises ``ApiError``: JSON, size, a field or the model is wrong.
        """
        self._explains = _wants_explanation(self._http)
        given = await read_object(self._http, self._context.options.max_body_nbytes)
        started_s = self._context.clock()
        asked = given if translate is None else await translate(given)
        body = await validated(self._http, schema, asked)
        if self._context.hot.is_wanted:
            salt = self._client.salt(str(given.get("cache_salt") or ""))
            self._digests = tuple(prefix_digests(given, salt))
            self._context.hot.count(self._digests)
        tiers = Tiers.of(self._lanes, body, self._client.name)
        if tiers is None:
            assert body.model is not None
            lane, self._adapter = await self._lanes.adapter(body.model)
            tiers = Tiers([lane], body.model)
        self._tiers = tiers
        self.record.stream = body.stream
        self.record.parse_s = self._observe("parse", started_s)
        return body

    async def respond(
        self, ask: Callable[[ApiContext], Awaitable[web.StreamResponse | None]]
    ) -> web.StreamResponse:
        """Call ``ask``, which calls ``answer``, for each model in turn, until it returns a response."""
        if self._tiers.is_last:
            return await self._in_turn(ask)
        try:
            if not self.record.stream:
                return await self._in_turn(ask)
            async with Heartbeats(self._http, new_stream()) as self._beats:
                try:
                    return await self._in_turn(ask)
                except Exception as error:
                    await self._beats.stop()
                    response = self._beats.response
                    if isinstance(error, ConnectionError) or not response.prepared:
                        raise
                    self.record.status = name_of(error)
                    await response.write(error_event(error))
                    await response.write_eof()
                    return response
        finally:
            if self._draft is not None:
                await self._draft.drop()

    async def _in_turn(
        self, ask: Callable[[ApiContext], Awaitable[web.StreamResponse | None]]
    ) -> web.StreamResponse:
        while True:
            try:
                self._context = await self._tiers.now.context()
                if (response := await ask(self._context)) is not None:
                    return response
            except MoonpoolError:
                if self._tiers.is_last or self._draft is not None:
                    raise
                # Too long for this model, or its files are wrong: perhaps not so for the next.
                self._tiers.escalate("failed", 0.0)
                self._failure = None

    async def tokenize(self, prompts: Awaitable[T]) -> T:
        started_s = self._context.clock()
        result = await prompts
        self.record.tokenize_s = self._observe("tokenize", started_s)
        return result

    async def answer(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        default_limit: int | None,
        tools: ToolUse | None = None,
        prepare: Callable[[Answer], None] | None = None,
        earlier: Messages | None = None,
    ) -> web.StreamResponse | None:
        """Generate and reply. ``default_limit``: output tokens of a request without a limit. ``prepare`` is
        called with the answer before it is written. ``earlier``: messages behind the request that are not in
        it. None: the next model shall answer (see ``respond``)."""
        structure = body.structure if tools is None or tools.structure is None else tools.structure
        await self._check(structure, tools)
        # A stream that goes on was judged where it began: only the model that began it goes on with it.
        drafts = not self._tiers.is_last and body.token_limit != 0 and body.past is None
        needs_logprobs = drafts and self._tiers.cascade.least_logprob > -math.inf
        runs = self._plan(body, prompts, default_limit, structure, tools, logprobs=needs_logprobs)
        self._runs = runs
        self.record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.record.sequences = [run.request.request_id for run in runs]
        context, self._draft = self._context, None
        stream: Resumable | None = None
        if body.stream:
            replays = self._kind.repeats_text
            stream = await resumable(self._http, context, self._id, body, runs, earlier, repeats_text=replays)
        if stream is not None and self._beats is not None:
            stream.announce(self._beats.response)  # the first comment sends the headers
        if drafts and not await self._drafted(runs, body):
            return None
        answer_id, created = self._id, int(context.unix_clock())
        if stream is not None:
            answer_id, created = stream.head.answer_id, stream.head.created
        if answer_id != self._id:  # a stream goes on: it is found by its answer's id here, too
            self.record.client_id = answer_id
            context.recent.add(self.record)
        answer = self._kind(answer_id, created, self._tiers.model, body, context.tokenizer)
        if prepare is not None:
            prepare(answer)
        if body.stream:
            return await self._stream(answer, runs, body, stream)
        return await self._reply(answer, runs, body)

    async def _check(self, structure: Structure | None, tools: ToolUse | None) -> None:
        """Raises StructureInvalid, StructureUnsupported or GrammarsBusy."""
        if structure is None:
            return
        if (grammars := self._context.grammars) is None:
            raise StructureUnsupported("this conductor has no tokenizer for structures")
        started_s = self._context.clock()
        try:
            await grammars.check(structure)
        except StructureInvalid as error:
            raise error if tools is None else await tool_at_fault(tools, grammars, error) from None
        self._observe("compile", started_s)

    def _plan(
        self,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        default_limit: int | None,
        structure: Structure | None,
        tools: ToolUse | None,
        *,
        logprobs: bool,
    ) -> list[SequenceRun]:
        """One run per choice, prompt by prompt. ``logprobs``: with log-probabilities in any case."""
        if len(prompts) * body.n > MAX_SEQUENCES:
            raise bad_request(f"n: {len(prompts)} prompts × {body.n} is more than {MAX_SEQUENCES}", "n")
        context, runs = self._context, list[SequenceRun]()
        slo_ttft_s, slo_tbt_s = (_limit_s(self._http, name) for name in (TTFT_HEADER, TPOT_HEADER))
        alone = len(prompts) * body.n == 1
        for prompt in prompts:
            limit = output_limit(prompt, body, default_limit, context.conductor.model)
            leader: SequenceRun | None = None
            for nth in range(body.n):
                params = context.defaults.params(
                    body,
                    context.conductor.model,
                    max_tokens=max(limit, 1),
                    num_logprobs=max(body.num_logprobs, 0) if logprobs else body.num_logprobs,
                    choice=nth,
                    structure=structure,
                )
                request = GenerateRequest(
                    request_id=self._id if alone else f"{self._id}-{len(runs)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=params,
                    priority=body.priority,
                    deadline_s=body.timeout,
                    tenant=self._client.salt(body.cache_salt),
                    client=self._client,
                    slo_ttft_s=slo_ttft_s,
                    slo_tbt_s=slo_tbt_s,
                    batch=_is_batch(body, self._client),
                    follows=bool(runs),
                    prompt_logprobs=isinstance(body, CompletionBody) and body.echo and body.num_logprobs >= 0,
                    adapter=self._adapter,
                    cache_hint=body.cache_hint.hint if body.cache_hint else None,
                    origin=self._http.headers.get(REGION_HEADER) or self._client.home_region,
                    digests=self._digests,
                )
                choice = Choice(len(runs), prompt, body, context.tokenizer, tools)
                run = SequenceRun(request, choice, leader)
                leader = leader or run
                runs.append(run)
        return runs

    async def _reply(self, answer: Answer, runs: list[SequenceRun], body: GenerationBody) -> web.Response:
        outcomes = [Outcome() for _ in runs]

        async def sink(run: SequenceRun, delta: Delta) -> None:
            outcomes[run.choice.index].add(delta)

        await self._generate(runs, sink, body)
        choices = [(run.choice, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
        whole = answer.whole(choices, usage_of(runs), self._explained() if self._explains else None)
        await answer.finish()
        return web.Response(body=whole, content_type="application/json")

    async def _stream(
        self, answer: Answer, runs: list[SequenceRun], body: GenerationBody, resumed: Resumable | None
    ) -> web.StreamResponse:
        async def end() -> bytes:
            explained = self._explained() if self._explains else None
            last = answer.ending(usage_of(runs), include_usage=body.include_usage, explained=explained)
            await answer.finish()
            return last

        stream = EventStream(self._http, self._context, answer, self.record, resumed, self._beats)
        return await stream.run(lambda sink: self._generate(runs, sink, body), end)

    async def _generate(self, runs: list[SequenceRun], sink: Sink, body: GenerationBody) -> None:
        with self._failing(), transcribed(runs, sink, self._context.log_options.prompt_chars) as sink:
            if body.token_limit == 0 and body.num_logprobs < 0:  # echo alone needs no model
                for run in runs:
                    await sink(run, run.choice.echo())
            elif self._draft is not None:
                if body.stream:
                    self._tiers.held(self._draft.held_s(self._context.clock()))
                try:
                    await self._draft.deliver(sink)
                finally:
                    self._spent(runs)
            else:
                try:
                    await run_all(runs, sink, self._context, self._arrived_s)
                finally:
                    self._spent(runs)
        self._tiers.answered()
        self.record.status = "done"

    async def _drafted(self, runs: list[SequenceRun], body: GenerationBody) -> bool:
        """Whether this model's answer counts; ``_generate`` goes on with it."""
        draft = self._draft = Draft(runs, self._tiers.cascade, logprobs=body.num_logprobs >= 0)
        cause = await draft.judge(self._context, self._arrived_s)
        if not cause:
            return True
        await draft.drop()
        self._draft = None
        self._spent(runs)
        self._tiers.escalate(cause, draft.seconds)
        return False

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError:
            raise  # the client's
        except Exception as error:
            self._failure = error
            raise

    def _spent(self, runs: Sequence[SequenceRun]) -> None:
        """The sequences have run on the nodes of this model."""
        if self._tiers.route is None:
            return
        timelines = (self._context.conductor.timeline(run.request.request_id) for run in runs)
        self._tiers.spent(sum(one.summary.cost for one in timelines if one is not None))

    def _explained(self) -> list[dict[str, Any]]:
        """The placements of each sequence."""
        timelines = [self._context.conductor.timeline(run.request.request_id) for run in self._runs]
        return [timeline.placements() for timeline in timelines if timeline is not None]

    def _observe(self, stage: str, started_s: float) -> float:
        seconds = self._context.clock() - started_s
        self._context.metrics.stage.labels(stage).observe(seconds)
        return seconds


def usage_of(runs: Sequence[SequenceRun]) -> Usage:
    """Each prompt counts once, with the cached tokens of the choice that had the fewest."""
    cached: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for run in runs:
        choice = run.choice
        key = id(choice.prompt)
        prompts[key] = len(choice.prompt.token_ids)
        cached[key] = min(cached.get(key, choice.num_cached_tokens), choice.num_cached_tokens)
    num_output_tokens = sum(run.choice.num_tokens for run in runs)
    return Usage(sum(prompts.values()), num_output_tokens, sum(cached.values()))


def _wants_explanation(http: web.Request) -> bool:
    given = http.headers.get(EXPLAIN_HEADER, "0")
    if given not in ("0", "1"):
        raise bad_request(f"the header {EXPLAIN_HEADER} must be 0 or 1, got {given[:64]!r}", EXPLAIN_HEADER)
    return given == "1"


def _limit_s(http: web.Request, header: str) -> float:
    """Seconds; 0: the request does not say."""
    given = http.headers.get(header)
    if given is None:
        return 0.0
    try:
        limit_s = float(given) / 1e3
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s <= DURATION_S.high:
        raise bad_request(
            f"the header {header} must be a number of milliseconds above 0, got {given[:64]!r}", header
        )
    return limit_s


def _is_batch(body: GenerationBody, client: Tenant) -> bool:
    if body.service_tier == "auto":
        return client.service_class == BATCH
    return body.service_tier == "flex"
