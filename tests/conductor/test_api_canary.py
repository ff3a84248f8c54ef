"""A model tried beside another one under its name, over HTTP: two conductors with scripted models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

from moonpool.conductor.access.gate import Gate
from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.conductor.canary import canaries as canaries_module
from moonpool.conductor.canary.canaries import Canaries
from moonpool.conductor.canary.record import CanaryRecords
from moonpool.conductor.errors import DeadlineExceeded, RequestFailed, RequestInvalid
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.requests.stream_records import StreamRecords
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.config.options import AuditOptions, ConductorOptions, SecurityOptions
from moonpool.runtime.config.routes import read_route
from moonpool.runtime.observing.audit import audited
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import CONDUCTOR, Caller
from tests.cluster.conftest import eventually
from tests.conductor.conftest import Api, ScriptedConductor, serving
from tests.conductor.core_nodes import RedisProcess
from tests.conductor.test_api_carried import events as carried_events

BROKEN = RequestFailed("no node", 1, 0)
START = "/v1/fleet/canary/old/start/new"
NEARLY_ALL = "99.9999"  # the side is a hash with the canary's random id


@pytest.fixture(autouse=True)
def open_cluster() -> None:
    """Operators prove nothing here: other tests do."""
    process.use(Security(SecurityOptions(insecure=True), Caller(CONDUCTOR, "c")))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries_module, "_POLL_S", 0.01)


@dataclass
class Pair:
    """One conductor: its API, and its two models."""

    api: Api
    old: ScriptedConductor
    new: ScriptedConductor
    canaries: Canaries
    events: list[tuple[str, str, str]] = field(default_factory=list)

    async def ask(self, prompt: str = "In the", model: str = "old", **body: Any) -> str:
        """The model that answered."""
        answer = await self.api.complete(model=model, prompt=prompt, max_tokens=2, **body)
        return str(answer["model"])

    async def side_of(self, conversation: str, turns: int = 1) -> str:
        said = [{"role": "user", "content": conversation}]
        said += [{"role": "user", "content": f"and {number}"} for number in range(1, turns)]
        status, answer = await self.api.post("/v1/chat/completions", {"model": "old", "messages": said})
        assert status == 200, answer
        return str(answer["model"])

    async def post(self, path: str, expect: int = 200) -> Any:
        status, answer = await self.api.post(path, {})
        assert status == expect, answer
        return answer

    async def status(self) -> Any:
        async with self.api.client.get(f"{self.api.url}/v1/fleet/canary") as response:
            found = (await response.json())["data"]
            return found[0] if found else None  # another conductor may know it already

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        """Wait for a state of the canary."""
        found: Any = None
        async with asyncio.timeout(60):
            while found is None or not holds(found):
                await asyncio.sleep(0.01)
                found = await self.status()
        return found

    async def counted(self, stable: int, candidate: int) -> Any:
        """Wait until so many requests are counted in all; return the counts of the sides."""
        wanted = {"stable": stable, "candidate": candidate}
        held = await self.until(
            lambda one: {side: counts["requests"] for side, counts in one["sides"].items()} == wanted
        )
        return held["sides"]


@asynccontextmanager
async def pair(
    checkpoint: Path, url: str, namespace: str, name: str = "c1", slo: Slo | None = None, route: Any = None
) -> AsyncIterator[Pair]:
    redis = connect(url)
    events: list[tuple[str, str, str]] = []
    canaries = Canaries(KVIndex(redis, namespace, timeout_s=3.0), name, lambda *event: events.append(event))
    made: dict[str, ScriptedConductor] = {}

    def lanes_of(context: ApiContext) -> Lanes:
        old, new = context.conductor, ScriptedConductor(context.tokenizer)
        old.model, new.model = (replace(old.model, name=name) for name in ("old", "new"))
        made.update(old=old, new=new)
        if slo is not None:
            old.slo = slo
        other = replace(context, conductor=new)
        lanes = [Lane("old", old, lambda: context, ("gpt",), loaded=context), Lane("new", new, lambda: other)]
        return Lanes(lanes, [read_route(route)] if route else [], canaries)

    async with serving(checkpoint, ConductorOptions(port=0, max_body_nbytes=1 << 16), lanes_of) as api:
        await canaries.start()
        try:
            yield Pair(api, made["old"], made["new"], canaries, events)
        finally:
            await canaries.close()
            await redis.aclose()
    assert not made["new"].running


@pytest.fixture
def namespace() -> str:
    return f"canary-{token_hex(4)}"


@pytest.fixture
async def one(checkpoint: Path, url: str, namespace: str) -> AsyncIterator[Pair]:
    async with pair(checkpoint, url, namespace) as found:
        yield found


async def test_a_share_of_conversations_goes_to_the_candidate_and_stays_there(one: Pair) -> None:
    assert await one.side_of("hello") == "old"
    await one.post(f"{START}/30")
    sides = {f"talk {number}": await one.side_of(f"talk {number}") for number in range(100)}
    share = sum(side == "new" for side in sides.values())
    assert 8 <= share <= 55
    for talk, side in list(sides.items())[:20]:
        assert await one.side_of(talk, turns=3) == side
    assert await one.ask(model="new") == "new", "by its own name it is no part of the canary"
    counted = 100 - share + sum(side == "old" for side in list(sides.values())[:20])
    await one.counted(counted, 120 - counted)
    assert {await one.ask(f"{number}", model="gpt") for number in range(40)} == {"old", "new"}


async def test_a_share_that_changes_moves_only_who_must_and_the_counts_begin_anew(
    checkpoint: Path, url: str, namespace: str
) -> None:
    async with pair(checkpoint, url, namespace) as one, pair(checkpoint, url, namespace, "c2") as other:
        share = "/v1/fleet/canary/old/share"
        assert "no canary of old runs" in (await one.post(f"{share}/20", 409))["error"]["message"]
        await one.post(f"{START}/20")
        talks = [f"talk {number}" for number in range(60)]
        sides = [await one.side_of(talk) for talk in talks]
        few = sides.count("new")
        await one.counted(60 - few, few)
        # A request that begins with the former share and ends with the next one counts for neither.
        release = asyncio.Event()
        one.old.script = lambda request: [release, *one.old.says("Hello")]
        one.new.script = lambda request: [release, *one.new.says("Hello")]
        late = asyncio.create_task(one.side_of("late"))
        await eventually(_begun(one, 61))
        await one.post(f"{share}/60")
        await other.until(lambda found: found["share"] == 60)
        release.set()
        await late
        after = [await other.side_of(talk) for talk in talks]
        many = after.count("new")
        assert many > few, "more of them"
        assert all(now == "new" for before, now in zip(sides, after, strict=True) if before == "new")
        await one.counted(60 - many, many)
        found = await one.status()
        (former,) = found["former"]
        assert (former["share"], former["sides"]["candidate"]["requests"]) == (20, few)
        back = await one.post(f"{share}/20")
        assert [each["share"] for each in back["former"]] == [20, 60]
        assert [await one.side_of(talk) for talk in talks] == sides, "the same ones as before"
        assert (await one.post(f"{share}/20"))["former"] == back["former"], "nothing changed"
        for wrong, status in (("0", 409), ("100", 409), ("nan", 409), ("many", 400)):
            await one.post(f"{share}/{wrong}", status)
        await one.post("/v1/fleet/canary/old/rollback")
        await one.post(f"{share}/30", 409)
        told = [text for _, _, text in one.events]
        assert told[1] == "new gets 60 % of the conversations, before 20"


def _begun(one: Pair, requests: int) -> Callable[[], Awaitable[bool]]:
    async def begun() -> bool:
        return len(one.old.requests) + len(one.new.requests) == requests

    return begun


async def test_promotion_and_rollback_change_what_the_name_means(one: Pair) -> None:
    await one.post(f"{START}/50")
    promoted = await one.post("/v1/fleet/canary/gpt/promote")  # by an alias of the name, too
    assert (promoted["state"], promoted["reason"]) == ("promoted", "an operator asked for it")
    old, new = len(one.old.requests), len(one.new.requests)
    for number in range(10):
        # The name in the answer is the one that was asked for, as of an alias.
        assert await one.ask(f"{number}") == "old"
        assert await one.ask(f"{number}", model="gpt") == "gpt"
    assert (len(one.old.requests), len(one.new.requests)) == (old, new + 20)
    async with one.api.client.get(f"{one.api.url}/v1/models/old") as response:
        assert (await response.json())["root"] == "new"
    await one.post("/v1/fleet/canary/old/rollback")
    assert await one.ask() == "old"
    assert (len(one.old.requests), len(one.new.requests)) == (old + 1, new + 20)
    assert [kind for kind, _, _ in one.events] == ["canary"] * 3
    assert one.events[1][2] == "new is promoted, new answers: an operator asked for it"


async def test_all_conductors_follow_and_a_new_one_takes_the_state_over(
    checkpoint: Path, url: str, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(pair(checkpoint, url, namespace))
        second = await stack.enter_async_context(pair(checkpoint, url, namespace, "c2"))
        await first.post(f"{START}/40")
        await second.until(lambda found: found["state"] == "running")
        talks = [f"talk {number}" for number in range(60)]
        sides = [await first.side_of(talk) for talk in talks]
        assert sides == [await second.side_of(talk) for talk in talks]
        new = 2 * sides.count("new")
        for each in (first, second):
            await each.counted(120 - new, new)
    async with pair(checkpoint, url, namespace, "c3") as third:
        assert (await third.status())["state"] == "running"
        await third.counted(120 - new, new)
        assert [await third.side_of(talk) for talk in talks] == sides
        await third.post("/v1/fleet/canary/old/promote")
    async with pair(checkpoint, url, namespace, "c4") as fourth:
        found = await fourth.status()
        assert (found["state"], found["sides"]["candidate"]["requests"]) == ("promoted", 2 * new - new // 2)
        await fourth.ask()
        assert (len(fourth.old.requests), len(fourth.new.requests)) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_candidate_fails_before_its_first_token_the_old_model_answers(
    one: Pair, stream: bool
) -> None:
    one.new.script = lambda request: [BROKEN]
    await one.post(f"{START}/50")
    for number in range(20):
        if stream:
            chunks = await one.api.events("/v1/completions", model="old", prompt=f"{number}")
            assert {chunk["model"] for chunk in chunks[:-1]} == {"old"}
        else:
            assert await one.ask(f"{number}") == "old"
    failed = len(one.new.requests)
    assert failed and len(one.old.requests) == 20
    sides = await one.counted(20 - failed, failed)
    assert (sides["candidate"]["errors"], sides["stable"]["errors"]) == (failed, 0)


async def test_an_answer_that_is_not_streamed_falls_back_also_when_it_breaks_off(one: Pair) -> None:
    one.new.script = lambda request: [20, 21, RequestFailed("no node", 1, 2)]
    await one.post(f"{START}/{NEARLY_ALL}")
    assert (await one.api.complete(model="old"))["choices"][0]["text"] == "Hello, world."
    # In a stream, the client has a part of it.
    chunks = await one.api.events("/v1/completions", model="old", prompt="In the")
    assert (chunks[0]["model"], chunks[-1]["error"]["code"]) == ("new", "request_failed")
    assert (await one.counted(0, 2))["candidate"]["errors"] == 2


async def test_a_candidate_without_a_node_or_configuration_is_passed_over_at_once(one: Pair) -> None:
    await one.post(f"{START}/{NEARLY_ALL}")
    one.new.is_ready = False
    assert await one.ask() == "old"
    assert (await one.counted(0, 1))["candidate"]["errors"] == 1
    assert not one.new.requests
    # It is refused as a candidate, too.
    await one.post("/v1/fleet/canary/old/rollback")
    assert "has no node" in (await one.post(f"{START}/{NEARLY_ALL}", 409))["error"]["message"]


async def test_a_prompt_that_is_too_long_for_the_candidate_alone_is_an_error_of_it(one: Pair) -> None:
    await one.post(f"{START}/{NEARLY_ALL}")
    one.new.model = replace(one.new.model, max_model_len=4)
    assert await one.ask("In the beginning " * 4) == "old"
    assert (await one.counted(0, 1))["candidate"]["errors"] == 1
    too_long = {"model": "old", "prompt": [20] * 999}
    assert (await one.api.post("/v1/completions", too_long))[0] == 400
    await one.ask("again")
    await one.counted(0, 2)


async def test_a_stream_that_can_go_on_elsewhere_is_of_one_model(one: Pair) -> None:
    streams = StreamRecords(one.canaries._records._index)
    for lane in one.api.server._lanes:
        (await lane.context()).streams = streams
    body = {"model": "old", "prompt": "In the", "stream": True, "stream_options": {"resumable": True}}
    await one.post(f"{START}/{NEARLY_ALL}")
    async with one.api.client.post(f"{one.api.url}/v1/completions", json=body) as response:
        events = (await response.text()).split("\n\n")
    assert len(one.old.requests) == 1, "the candidate is not tried with it"
    last_id = next(line for line in events[0].splitlines() if line.startswith("id: ")).removeprefix("id: ")
    await streams.flush()
    await one.post("/v1/fleet/canary/old/promote")
    status, answer = await one.api.post("/v1/completions", body, headers={"Last-Event-ID": last_id})
    assert (status, answer["error"]["code"]) == (409, "other_request")


async def test_a_stream_from_elsewhere_goes_on_with_its_model_and_counts_for_no_side(one: Pair) -> None:
    tokens = one.old.says("Hello, world.")
    one.old.script = lambda request: tokens[len(request.output_ids) :]
    body: dict[str, Any] = {"model": "old", "prompt": "In the", "stream": True}
    whole = await carried_events(one.api, "/v1/completions", body)
    await one.post(f"{START}/{NEARLY_ALL}")
    rest = await carried_events(one.api, "/v1/completions", body | {"past": whole[1].past})
    assert [event.data for event in rest] == [event.data for event in whole[2:]]
    assert not one.new.requests
    assert await one.ask() == "new"
    sides = await one.counted(0, 1)
    assert sides["candidate"]["errors"] == 0


async def test_errors_of_clients_count_for_no_side_and_those_of_the_cluster_do(one: Pair) -> None:
    await one.post(f"{START}/50")
    for error, status in ((RequestInvalid("too large"), 400), (DeadlineExceeded(1.0, 0), 504)):
        one.old.script = one.new.script = lambda request, error=error: [error]
        for number in range(20):
            answered, _ = await one.api.post("/v1/completions", {"model": "old", "prompt": f"{number}"})
            assert answered == status
    found = await one.until(lambda found: sum(each["requests"] for each in found["sides"].values()) == 20)
    assert all(0 < counts["errors"] == counts["requests"] for counts in found["sides"].values())


async def test_no_logprobs_are_computed_for_a_candidate_unasked(one: Pair) -> None:
    """They would cost it time that the other side does not spend."""
    await one.post(f"{START}/{NEARLY_ALL}")
    assert await one.ask() == "new"
    assert one.new.requests[-1].sampling.num_logprobs < 0


async def test_clients_that_leave_count_once_the_first_token_was_due(
    checkpoint: Path, url: str, namespace: str
) -> None:
    async with pair(checkpoint, url, namespace, slo=Slo(0.05)) as one:
        await one.post(f"{START}/{NEARLY_ALL}")
        one.new.script = lambda request: [asyncio.Event()]

        leaves = asyncio.create_task(one.ask())
        await one.new.until(lambda: bool(one.new.running))
        await asyncio.sleep(0.1)  # longer than its first token may take
        leaves.cancel()
        await asyncio.wait((leaves,))
        counts = (await one.counted(0, 1))["candidate"]
        assert (counts["errors"], counts["ttft_within"]) == (0, 0)
        one.new.script = lambda request: one.new.says("Hello")
        await one.ask()
        assert (await one.counted(0, 2))["candidate"]["ttft_within"] <= 1


async def test_a_broken_candidate_is_rolled_back_by_itself(
    checkpoint: Path, url: str, namespace: str, tmp_path: Path
) -> None:
    with audited(AuditOptions(path=str(tmp_path)), "api"):
        async with pair(checkpoint, url, namespace) as one:
            one.new.script = lambda request: [BROKEN]
            await one.post(f"{START}/50?auto=1")
            for number in range(40):
                assert await one.ask(f"{number}") == "old"
            found = await one.until(lambda found: found["state"] != "running")
            assert found["state"] == "rolled back"
            assert "clearly worse" in found["reason"]
            before = len(one.new.requests)
            for number in range(10):
                await one.ask(f"{number}")
            assert len(one.new.requests) == before
    lines = [json.loads(line) for file in tmp_path.glob("audit-*") for line in file.read_text().splitlines()]
    changes = [(line["what"], line["who"]) for line in lines if line["event"] == "administrative"]
    assert changes == [(f"POST {START}/50", "admin"), ("canary old rollback new", "c1")]


async def test_a_good_candidate_is_promoted_by_itself_and_one_by_hand_waits(
    checkpoint: Path, url: str, namespace: str
) -> None:
    good, seconds = {"requests": 2000, "ttft_within": 2000}, Slo(1.0)
    async with pair(checkpoint, url, namespace, slo=seconds) as one:
        await one.post(f"{START}/50")

        async def counts(side: str) -> None:
            canary = one.canaries._known["old"]
            one.canaries.add(canary, side, canaries_module.Tally(**good))

        for side in ("stable", "candidate"):
            await counts(side)
        found = await one.until(lambda found: found["verdict"] == "promote")
        assert (found["state"], len(found["reasons"])) == ("running", 2)
        await one.post("/v1/fleet/canary/old/rollback")
        await one.post(f"{START}/50?auto=1&least=2001")
        for side in ("stable", "candidate"):
            await counts(side)
        assert (await one.counted(2000, 2000))["candidate"]["requests"] == 2000
        assert (await one.status())["state"] == "running"
        assert await one.ask("first") in ("old", "new")
        for number in range(20):
            await one.ask(f"{number}")
        found = await one.until(lambda found: found["state"] == "promoted")
        assert "first token in time: 100.0%" in found["reason"]


async def test_what_cannot_be_begun_is_refused(one: Pair) -> None:
    for share, status in (("0", 409), ("100", 409), ("-1", 409), ("nan", 409), ("x", 400)):
        await one.post(f"{START}/{share}", status)
    await one.post("/v1/fleet/canary/old/start/old/10", 409)
    await one.post("/v1/fleet/canary/odl/start/new/10", 404)
    for least in ("0", "1000001", "00000001000001"):
        await one.post(f"{START}/10?least={least}", 400)
    assert "no tenants" in (await one.post(f"{START}/10?tenant=acme", 409))["error"]["message"]
    for act in ("promote", "rollback"):
        await one.post(f"/v1/fleet/canary/old/{act}", 409)
    await one.post(f"{START}/10")
    assert "is tried as old now" in (await one.post(f"{START}/20", 409))["error"]["message"]


async def test_a_canary_of_one_tenant_leaves_the_others_alone(one: Pair, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('admin_keys = ["sk-ops"]\n[acme]\nkeys = ["sk-1"]\n[other]\nkeys = ["sk-2"]\n')
    process.use(Security(SecurityOptions(cluster_key="0123456789abcdef"), Caller(CONDUCTOR, "c")))
    one.api.context.gate = Gate.load(str(file))

    async def ask(key: str, number: int) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "old", "prompt": f"{number}", "max_tokens": 2}
        status, answer = await one.api.post("/v1/completions", body, headers=headers)
        assert status == 200, answer
        return str(answer["model"])

    path = f"{START}/100?tenant=acme"
    assert (await one.api.post(path, {}, headers={"Authorization": "Bearer sk-1"}))[0] == 403
    assert (await one.api.post(path, {}, headers={"Authorization": "Bearer sk-ops"}))[0] == 200
    assert {await ask("sk-1", number) for number in range(10)} == {"new"}
    assert {await ask("sk-2", number) for number in range(15)} == {"old"}

    async def counted() -> bool:
        # The others are what the candidate is compared with.
        (found,) = one.canaries.status()
        return [found["sides"][side]["requests"] for side in ("stable", "candidate")] == [15, 10]

    await eventually(counted)


async def test_a_route_leads_to_a_canary_and_a_cascade_to_what_was_promoted(
    checkpoint: Path, url: str, namespace: str
) -> None:
    route = {"name": "auto", "model": "old"}
    async with pair(checkpoint, url, namespace, route=route) as one:
        await one.post(f"{START}/50")
        assert {await one.ask(f"{number}", model="auto") for number in range(30)} == {"old", "new"}
        await one.post("/v1/fleet/canary/old/promote")
        assert {await one.ask(f"{number}", model="auto") for number in range(5)} == {"new"}


async def test_without_redis_requests_go_on_as_they_did_and_counts_come_later(
    one: Pair, redis: RedisProcess
) -> None:
    await one.post(f"{START}/{NEARLY_ALL}")
    await one.until(lambda found: found["state"] == "running")
    redis.stop()
    try:
        assert await one.ask() == "new"
        assert (await one.post("/v1/fleet/canary/old/promote", 503))["error"]["code"] == "index_unavailable"
    finally:
        redis.resume()
    await one.counted(0, 1)


async def test_of_two_changes_in_one_moment_one_is_made(one: Pair, url: str, namespace: str) -> None:
    await one.post(f"{START}/50")
    redis = connect(url)
    ours, theirs = (CanaryRecords(KVIndex(redis, namespace, timeout_s=3.0)) for _ in range(2))
    for each in (ours, theirs):
        await each.read()
    canary = ours.known["old"]
    assert await theirs.put(replace(canary, state="rolled back"))
    assert not await ours.put(replace(canary, state="promoted"))
    await ours.read()
    assert ours.known["old"].state == "rolled back"
    await redis.aclose()


async def test_an_entry_of_another_cluster_is_none(one: Pair, url: str, namespace: str) -> None:
    await one.post(f"{START}/{NEARLY_ALL}")
    redis = connect(url)
    key = f"{{{namespace}}}:canaries"
    sealed = await redis.hget(key, "old")
    await redis.hset(key, "old", sealed[:-2] + b"xx")

    async def gone() -> bool:
        return not one.canaries.status()

    await eventually(gone)
    assert await one.ask() == "old"
    await one.post(f"{START}/{NEARLY_ALL}")  # another one may be begun
    await redis.aclose()
