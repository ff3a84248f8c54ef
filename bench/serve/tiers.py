"""Cascades of two models: what a request costs, and how good its answer is, by the threshold."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moonpool import demo
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.serve.client.answer import read_json, read_text
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed
from moonpool.bench.serve.settings import Settings
from moonpool.runtime.reports.report import Curve, Row

SMALL = Path(demo.__file__).parent / "small"
THRESHOLDS = (-1.6, -1.4, -1.3, -1.2, -1.1, -1.0, -0.8)  # least mean log-probability, nats a token
NUM_PROMPTS, OUTPUT_TOKENS = 64, 48
CASE = f"1 concurrent, + {OUTPUT_TOKENS} tokens, greedy"
PANEL = "cost against quality"
_OPENINGS = ("What is {}?", "Tell me of {}", "And the {} was", "Of {} it is written", "The {}")
_NODE = ("cluster.prefill=0", "cluster.decode=0", "cluster.both=1", "conductor.rejection=none")


@dataclass(frozen=True, slots=True)
class Point:
    """Means over all prompts. ``quality``: log-probability of an answer's tokens under the large model."""

    cost: float  # node-seconds a request
    quality: float
    escalated: float  # share of the requests


async def tier_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """Cost, quality and escalations of each model alone, and of a cascade by threshold."""
    model = settings.model_dir
    thresholds = THRESHOLDS[::3] if run.quick else THRESHOLDS
    prompts = _prompts(model, settings.seed, 4 if run.quick else NUM_PROMPTS)
    routes = {"small alone": "only-small", "large alone": "only-large"}
    routes |= {f"cascade, threshold {least:g}": f"cascade-{-least:g}" for least in thresholds}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tiers-")))
        file = folder / "models.toml"
        file.write_text(_models(model, thresholds), encoding="utf-8")
        run.say("starting a cluster of two models")
        url = await stack.enter_async_context(local_cluster((*_NODE, *settings.sets, f"models.path={file}")))
        http = await stack.enter_async_context(HttpClient(url))
        for name in ("small", "large"):  # warm, and each prompt in the cache: all routes find the same
            for prompt in prompts:
                await _ask(http, name, prompt)
        measured = await _measure(http, list(routes.values()), prompts)
        points = [(point.cost, point.quality) for point in measured]
        for case, point in zip(routes, measured, strict=True):
            yield Row(f"{case}, {CASE}", "cost of a request", 1e3 * point.cost, "node-ms")
            yield Row(f"{case}, {CASE}", "log-probability under the large model", point.quality, "nats/token")
            yield Row(f"{case}, {CASE}", "escalated", point.escalated, "ratio")
        run.curves.append(Curve(PANEL, "cascade", "node-seconds a request", "nats/token", points[2:]))
        run.curves.append(Curve(PANEL, "one model", "node-seconds a request", "nats/token", points[:2]))


def _models(model: Path, thresholds: Sequence[float]) -> str:
    """The file of models: a second of either node has one price, as they are of one kind."""
    parts = [
        f'[[model]]\nname = "large"\npath = {json.dumps(str(model))}\n',
        f'[[model]]\nname = "small"\npath = {json.dumps(str(SMALL))}\n',
        '[[route]]\nname = "only-small"\nmodel = "small"\n',
        '[[route]]\nname = "only-large"\nmodel = "large"\n',
    ]
    for least in thresholds:
        cascade = f'{{ models = ["small", "large"], least_logprob = {least} }}'
        parts.append(f'[[route]]\nname = "cascade-{-least:g}"\ncascade = {cascade}\n')
    return "\n".join(parts)


def _prompts(model: Path, seed: int, count: int) -> list[list[int]]:
    """Short openings with words of the vocabulary."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = sorted(word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[A-Za-z][a-z]{2,}", word))
    rng = random.Random(f"tiers {seed}")
    texts = (rng.choice(_OPENINGS).format(rng.choice(words)) for _ in range(count))
    return [tokenizer.encode(text).ids for text in texts]


async def _measure(http: HttpClient, routes: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[Point]:
    """A point for each route; each prompt goes to all of them in turn."""
    before = [await _counts(http, route) for route in routes]
    answers = [[await _ask(http, route, prompt) for route in routes] for prompt in prompts]
    after = [await _counts(http, route) for route in routes]
    scores = [
        [await _score(http, prompt, answer) for answer in given]
        for prompt, given in zip(prompts, answers, strict=True)
    ]
    count = len(prompts)
    return [
        Point((cost - cost0) / count, sum(given) / count, (escalated - escalated0) / count)
        for (cost0, escalated0), (cost, escalated), given in zip(
            before, after, zip(*scores, strict=True), strict=True
        )
    ]


async def _ask(http: HttpClient, model: str, prompt: Sequence[int]) -> list[int]:
    """The tokens of an answer. Raises RequestFailed."""
    wanted = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "return_token_ids": True}
    choice = await _complete(http, {"model": model, "prompt": list(prompt), "temperature": 0, **wanted})
    tokens: list[int] = choice["token_ids"]
    return tokens


async def _score(http: HttpClient, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Mean log-probability that the large model gives the answer's tokens. Raises RequestFailed."""
    wanted = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    choice = await _complete(http, {"model": "large", "prompt": [*prompt, *answer], **wanted})
    values = choice["logprobs"]["token_logprobs"][len(prompt) : len(prompt) + len(answer)]
    return float(sum(values)) / len(values)


async def _complete(http: HttpClient, body: dict[str, Any]) -> dict[str, Any]:
    status, content = read_json(await http.post(COMPLETIONS, json.dumps(body).encode()))
    if status != 200:
        raise RequestFailed(f"{body['model']}: status {status}: {content}")
    choice: dict[str, Any] = content["choices"][0]
    return choice


async def _counts(http: HttpClient, route: str) -> tuple[float, float]:
    """(node-seconds, escalations) of a route so far."""
    page = read_text(await http.get("/metrics"))
    lines = re.findall(
        rf'^moonpool_route_(cost|escalations)_total{{.*route="{re.escape(route)}".*}} (\S+)',
        page,
        re.MULTILINE,
    )
    sums = {"cost": 0.0, "escalations": 0.0}
    for name, value in lines:
        sums[name] += float(value)
    return sums["cost"], sums["escalations"]
