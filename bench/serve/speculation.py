"""Speculative decoding beside plain decoding, on the same nodes: a request says which it wants.

The two have prompts of their own: of equal ones the second would find the KV in the cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from statistics import median

from tokenizers import Tokenizer

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread, turns
from moonpool.bench.serve.client.answer import read_text
from moonpool.bench.serve.client.cluster import cluster_server
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.client.workload import Dialect
from moonpool.bench.serve.peers.contestants import ServerContestant
from moonpool.bench.serve.peers.vllm import vllm_server
from moonpool.bench.serve.settings import Settings
from moonpool.runtime.config.engine_options import ModelOptions
from moonpool.runtime.reports.report import Row, versus

METHODS = ("ngram", "suffix", "draft")
PLAIN = "plain decoding"
CONCURRENT, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 256, 256
_CODE = """def area_of_{0}(width, height):
    if width < 0 or height < 0:
        raise ValueError("{0}: negative")
    return width * height


"""
_PROSE = (
    "The morning was cold and the road lay empty between the hedges. She had walked since before dawn, and "
    "the letter in her coat was still unopened. A dog barked somewhere behind the mill. When the carrier "
    "came up the hill he stopped his horse without a word, and looked at her shoes, and then at the sky. "
    "He made room on the board beside him. They went on through the wood, where the frost had not yet gone "
    "from the ferns, and neither of them asked what the other had in mind. At the bridge a boy was counting "
    "his fish. The water stood high for the season; it carried branches, straw, and once a chair. Beyond the "
    "ford the land opened; she saw the roofs of the town, smaller than in her memory, and heard a bell. "
    "The carrier stopped before the inn and would take no money. She stood in the yard with her bundle until "
    "he had turned the corner, and a girl came out to ask whether she wanted a bed or a meal. Upstairs there "
    "was a window on the market, a jug with a crack, and a chair without a back. She put the letter on the "
    "sill, washed her hands, and slept until the lamps were lit. "
)
TEXTS = {
    "repetitive": "And the evening and the morning were the {0} day. " * 18,
    "code": "".join(_CODE.replace("{0}", "{0}" + name) for name in ("box", "wall", "field", "page")),
    "prose": "{0}" + _PROSE,
}
_WARM_UP = 1  # rounds
_ACCEPTED = re.compile(r"^moonpool_accepted_tokens_total\S* (\S+)", re.MULTILINE)
# Of vLLM's own method: as many tokens as ours proposes, after as many equal ones.
_PEER_TOKENS, _PEER_MATCH = 4, 3
_PEER_SETTING = {
    "method": "ngram",
    "num_speculative_tokens": _PEER_TOKENS,
    "prompt_lookup_max": _PEER_MATCH,
    "prompt_lookup_min": _PEER_MATCH,
}
WITH_NGRAM = f" ngram, {_PEER_TOKENS} tokens after {_PEER_MATCH} equal ones"


async def method_rows(run: Run, settings: Settings) -> list[Row]:
    """Tokens a second of one stream and of several, by kind of text, with each method and without; of vLLM as
    a peer, too."""
    model_dir, rows = settings.model_dir, list[Row]()
    # The small model that ships drafts for the one that ships, and for no other.
    methods = METHODS if model_dir == ModelOptions().directory else METHODS[:-1]
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    async with AsyncExitStack() as stack:
        contestants: dict[str, ServerContestant] = {}
        for method in methods:
            run.say(f"starting a cluster with {method}")
            options = [*settings.sets, f"engine.speculative.method={method}"]
            server = await stack.enter_async_context(cluster_server(method, options))
            plain = Dialect(server.dialect.model, more={"speculation": False})
            contestants[plain_beside(method)] = ServerContestant(Server(PLAIN, server.http, plain))
            contestants[method] = ServerContestant(server)
        for peer in run.peers:
            if peer == "transformers":
                run.say("transformers is left out: it is no server")
                continue
            for name, arguments in _peer_forms(peer):
                run.say(f"starting {name}")
                vllm = vllm_server(
                    model_dir, peer, threads=settings.peer_threads, name=name, arguments=arguments
                )
                contestants[name] = await stack.enter_async_context(vllm)
        for kind, text in TEXTS.items():
            for concurrent in (1, CONCURRENT):
                before = await _accepted(contestants)
                rates = await _rates(contestants, tokenizer, text, concurrent, run.rounds)
                rows += rate_rows(kind, concurrent, rates)
                num_requests = (_WARM_UP + run.rounds) * concurrent
                for method, after in (await _accepted(contestants)).items():
                    rows.append(step_row(kind, concurrent, method, num_requests, after - before[method]))
    return rows


def plain_beside(method: str) -> str:
    """The name of plain decoding on the nodes of a method."""
    return f"{PLAIN} beside {method}"


def _peer_forms(peer: str) -> Iterator[tuple[str, list[str]]]:
    """Names and arguments of a peer's servers: without speculation and with."""
    yield peer, []
    yield f"{peer}{WITH_NGRAM}", ["--speculative-config", json.dumps(_PEER_SETTING)]


def prompts_of(tokenizer: Tokenizer, text: str, concurrent: int, number: int, plain: bool) -> list[list[int]]:
    """Those of a round: the text with numbers that no other prompt has. ``PROMPT_TOKENS`` each."""
    marks = [f"{100 * concurrent + number} {int(plain)} {i} " for i in range(concurrent)]
    return [tokenizer.encode(text.replace("{0}", mark)).ids[:PROMPT_TOKENS] for mark in marks]


async def _rates(
    contestants: Mapping[str, ServerContestant], tokenizer: Tokenizer, text: str, concurrent: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens a second of each contestant's turns."""
    prompts: dict[bool, list[list[int]]] = {}  # whether they are decoded plainly on nodes of ours

    def draw(number: int) -> None:
        for plain in (False, True):
            prompts[plain] = prompts_of(tokenizer, text, concurrent, number, plain)

    async def rate(name: str) -> float:
        # Of one stream, too, from sending to the end: a peer that keeps both cores busy may send its tokens
        # late, all in one packet.
        return await contestants[name].together(prompts[name.startswith(PLAIN)], OUTPUT_TOKENS)

    calls = {name: partial(rate, name) for name in contestants}
    return await turns(calls, rounds, warm_up=_WARM_UP, rotate=1, before=draw)


async def _accepted(contestants: Mapping[str, ServerContestant]) -> dict[str, float]:
    """Proposed tokens that each method's cluster has accepted."""
    found = {}
    for method in filter(contestants.__contains__, METHODS):
        page = read_text(await contestants[method].server.http.get("/metrics"))
        found[method] = sum(map(float, _ACCEPTED.findall(page)))
    return found


def _case(kind: str, concurrent: int) -> str:
    return f"{kind}: {concurrent} concurrent, {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, greedy"


def step_row(kind: str, concurrent: int, method: str, num_requests: int, num_accepted: float) -> Row:
    """Tokens after the first of each request by decode step, the rounds that do not count included."""
    num_tokens = num_requests * (OUTPUT_TOKENS - 1)
    value = num_tokens / (num_tokens - num_accepted)
    return Row(_case(kind, concurrent), f"tokens a step, {method}", value, "tokens")


def rate_rows(kind: str, concurrent: int, rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Each method beside plain decoding; each server of a peer beside ours of its kind, and beside itself
    without speculation. ``rates``: tokens a second of each round, by name."""
    case = _case(kind, concurrent)
    metric = "tokens/s of one stream" if concurrent == 1 else "output throughput"

    def row_of(name: str) -> Row:
        return spread(case, f"{metric}, {name}", rates[name], "tokens/s")

    rows = [row_of(plain_beside(METHODS[0]))]
    for method in filter(rates.__contains__, METHODS):
        without = rates[plain_beside(method)]
        row = versus(row_of(method), PLAIN, median(without))
        # Of the rounds' two turns, which saw the same machine.
        ratio = median(theirs / plain for theirs, plain in zip(rates[method], without, strict=True))
        rows.append(replace(row, ratio=ratio))
    for name in rates:
        if name in METHODS or name.startswith(PLAIN):
            continue
        peer = name.removesuffix(WITH_NGRAM)
        ours = plain_beside(METHODS[0]) if name == peer else METHODS[0]
        rows.append(versus(row_of(ours), name, median(rates[name])))
        if name != peer:
            rows.append(versus(row_of(name), peer, median(rates[peer])))
    return rows
