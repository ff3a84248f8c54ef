"""A tiny checkpoint and a scripted core, so that the API is tested over HTTP without a cluster."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as TokenizerCore
from tokenizers import decoders, models, pre_tokenizers, trainers

from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.models.lanes import Lanes
from moonpool.conductor.api.sampling_defaults import SamplingDefaults
from moonpool.conductor.fleet.served_model import ServedModel
from moonpool.conductor.observing.request_metrics import ClusterCounts, RequestMetrics
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.observing.timelines.timeline import RequestTimeline
from moonpool.conductor.request import GenerateRequest, TokenEvent, TokenLogprobs
from moonpool.conductor.server import ApiServer
from moonpool.conductor.text.chat_template import load_chat_template
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.structure.grammars import Grammars
from tests.conductor.core_nodes import RedisProcess, redis_process

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
CORPUS = ["In the beginning God created the heaven and the earth. The end of it, naïve café 你好 👩‍👩‍👧."]
EOS = 1
COST = 0.5  # of each sequence, whatever it took


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all the API reads of a model."""
    path = tmp_path_factory.mktemp("tiny")
    core = TokenizerCore(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|eos|>"},
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "top_k": 7}))
    return path


class ScriptedFleet:
    """What the API sees of ``FleetAdmin``. ``calls``: what it was asked to change."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    async def listed(self) -> dict[str, Any]:
        return {"provider": "scripted", "trouble": "", "nodes": []}

    async def scale(self, role: str, count: int) -> dict[str, Any]:
        return self._done({"role": role, "count": count, "started": [], "stopped": []}, "scale", role, count)

    async def switch_role(self, node_id: str, role: str) -> dict[str, Any]:
        return self._done({"node_id": node_id, "role": role}, "switch", node_id, role)

    async def switch_model(self, node_id: str, target: ScriptedFleet) -> dict[str, Any]:
        return self._done({"node_id": node_id}, "switch model", node_id, target is self)

    async def drain(self, node_id: str) -> dict[str, Any]:
        return self._done({"node_id": node_id, "by": "scripted"}, "drain", node_id)

    def _done(self, answer: dict[str, Any], *call: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.calls.append(call)
        return answer


class ScriptedAdapters:
    """LoRA adapters by name, without nodes."""

    def __init__(self) -> None:
        self.known: dict[str, node_pb2.Adapter] = {}
        self.error: Exception | None = None

    def find(self, name: str) -> node_pb2.Adapter | None:
        return self.known.get(name)

    async def awaited(self, name: str) -> node_pb2.Adapter | None:
        return self.find(name)

    def all(self) -> list[node_pb2.Adapter]:
        return list(self.known.values())

    async def load(self, name: str, path: str, *, replace: bool) -> node_pb2.Adapter:
        if self.error is not None:
            raise self.error
        self.known[name] = node_pb2.Adapter(name=name, path=path, digest="d" * 32, rank=8)
        return self.known[name]

    async def unload(self, name: str) -> None:
        if self.error is not None:
            raise self.error
        del self.known[name]


class ScriptedOffers:
    """What the API sees of ``Offers``: no prefix is hot."""

    def made(self, *, moves: bool) -> list[dict[str, Any]]:
        return []

    async def take(self, texts: list[str]) -> dict[str, Any]:
        return {"held": [], "copied": 0}


class ScriptedConductor:
    """What the API sees of a core. ``script`` says for each request what comes: token ids, or errors."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.model = ServedModel("tiny", 256, 320, (EOS,), 1, 1, 8, 16)
        self.nodes: dict[str, Any] = {}
        self.script: Callable[[GenerateRequest], list[Any]] = lambda request: self.says("Hello, world.")
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self._waiters: list[asyncio.Event] = []
        self.cached = 0
        self.degraded: list[str] = []
        self.is_ready = True
        self.timelines: dict[str, RequestTimeline] = {}
        self.fleet = ScriptedFleet()
        self.adapters = ScriptedAdapters()
        self.offers = ScriptedOffers()
        self.num_others = self.num_successors = 0
        self.sibling_ports: list[int] = []
        self.slo = Slo()

    def says(self, text: str, *after: Any) -> list[Any]:
        return [*self.tokenizer.encode_now(text, add_special_tokens=False).tolist(), *after]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Each item of the script: a token id, an event to wait for, or an exception to raise."""
        self.requests.append(request)
        timeline = RequestTimeline(request.request_id, 0.0, 0.0, request.client.name)
        timeline.summary.cost = COST
        self.timelines[request.request_id] = timeline
        self.running.add(request.request_id)
        self._notify()
        index, sampling = 0, request.sampling
        try:
            for item in self.script(request):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                if isinstance(item, Exception):
                    raise item
                ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self.model.eos_token_ids)
                index += 1
                last = "stop" if item in ends else "length" if index == sampling.max_tokens else None
                yield self._event(request, index - 1, item, last)
                if last:
                    return
            # A script that ends before the limit ends as a model does.
            yield self._event(request, index, EOS, "stop")
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)
            self._notify()

    def _event(self, request: GenerateRequest, index: int, token_id: int, last: str | None) -> TokenEvent:
        prompt = None
        if index == 0 and request.prompt_logprobs:
            prompt = tuple(self._logprobs(request, i) for i in request.prompt_token_ids.tolist()[1:])
        return TokenEvent(
            index,
            token_id,
            self._logprobs(request, token_id) if request.sampling.num_logprobs >= 0 else None,
            last,
            self.cached if index == len(request.output_ids) == 0 else 0,
            prompt,
        )

    def _logprobs(self, request: GenerateRequest, token_id: int) -> TokenLogprobs:
        top = tuple((10 + i, -float(i) - 0.5) for i in range(request.sampling.num_logprobs))
        return TokenLogprobs(-token_id / 16, 1, top)

    def _notify(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, looked at whenever a request begins or ends."""
        waiter = asyncio.Event()
        self._waiters.append(waiter)
        async with asyncio.timeout(60):
            while not condition():
                await waiter.wait()
                waiter.clear()

    def timeline(self, request_id: str) -> RequestTimeline | None:
        return self.timelines.get(request_id)

    def cluster(self) -> dict[str, Any]:
        tiers = [{"name": "pool", "num_blocks": 8, "num_used_blocks": 2}]
        return {"nodes": [{"id": "decode-0", "role": "decode", "tiers": tiers}]}

    def planner(self) -> dict[str, Any]:
        return {"mode": "off", "state": "off", "roles": {}, "steps": []}

    def counts(self) -> ClusterCounts:
        return ClusterCounts(num_blocks=8, num_used_blocks=2)

    @property
    def serves(self) -> bool:
        return self.is_ready

    def ready(self) -> tuple[bool, list[str]]:
        return self.is_ready, self.degraded


@dataclass
class Api:
    """A running server, its core and a client."""

    core: ScriptedConductor
    context: ApiContext
    server: ApiServer
    client: aiohttp.ClientSession
    registry: CollectorRegistry
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.server.port}"

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and parsed answer."""
        async with self.client.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def complete(self, **body: Any) -> Any:
        status, answer = await self.post("/v1/completions", {"model": "tiny", "prompt": "In the", **body})
        assert status == 200, answer
        return answer

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream; the last is ``"[DONE]"`` unless it broke."""
        async with self.client.post(self.url + path, json={"stream": True, **body}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            raw = await response.text()
        assert raw.endswith("\n\n")
        data = [event.removeprefix("data: ") for event in raw[:-2].split("\n\n")]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


@asynccontextmanager
async def serving(
    checkpoint: Path, options: ConductorOptions, lanes_of: Callable[[ApiContext], Lanes] = Lanes.alone
) -> AsyncIterator[Api]:
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    core = ScriptedConductor(tokenizer)
    registry = CollectorRegistry()
    context = ApiContext(
        conductor=core,
        tokenizer=tokenizer,
        template=load_chat_template(checkpoint, tokenizer.config, tokenizer.special_tokens),
        defaults=SamplingDefaults.from_checkpoint(checkpoint),
        metrics=RequestMetrics("tiny", registry),
        options=options,
        grammars=Grammars(checkpoint, core.model.vocab_size, core.model.eos_token_ids),
    )
    server = ApiServer(context, lanes_of(context))
    await server.start()
    async with aiohttp.ClientSession() as client:
        try:
            yield Api(core, context, server, client, registry)
        finally:
            await server.close()
    # However a test ended, nothing may be left running in the core, and nothing counted as running.
    assert not core.running
    assert registry.get_sample_value("moonpool_running_requests", {"model_name": "tiny"}) == 0
    assert registry.get_sample_value("moonpool_waiting_requests", {"model_name": "tiny"}) == 0


@pytest.fixture
async def api(checkpoint: Path) -> AsyncIterator[Api]:
    async with serving(checkpoint, ConductorOptions(port=0, max_body_nbytes=1 << 16)) as running:
        yield running


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with redis_process() as process:
        yield process


@pytest.fixture
def url(redis: RedisProcess) -> str:
    return redis.url


@pytest.fixture
async def client(api: Any) -> AsyncIterator[Any]:
    """OpenAI's own."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
        yield client


TOOL_TEMPLATE = (
    "{% if tools %}<|system|>Call these as <tool_call>: {{ tools | tojson }}<|eos|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|eos|>"
    "{% endfor %}<|assistant|>"
)


@pytest.fixture
async def tools_api(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Api]:
    """With a template that shows tools, and room for their descriptions."""
    path = tmp_path / "tiny"
    shutil.copytree(checkpoint, path)
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    async with serving(path, ConductorOptions(port=0)) as running:
        running.core.model = replace(running.core.model, max_model_len=8192)
        yield running


def prompt_of(api: Api) -> str:
    """The text of the latest request's prompt."""
    token_ids = api.core.requests[-1].prompt_token_ids
    return api.core.tokenizer.decode(token_ids, skip_special=False)
