"""Speculative decoding: the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence
from moonpool.engine.batching.step_plan import Draft
from moonpool.engine.speculation.history import NgramProposer, SuffixProposer
from moonpool.engine.speculation.speculator import Speculator
from moonpool.errors import ConfigError
from moonpool.runtime.config.engine_options import EngineOptions, ParallelOptions, SpeculativeOptions
from tests.engine.conftest import prompt
from tests.engine.test_families import FAMILIES

NUM_TOKENS = 120


def sequence_of(token_ids: list[int], **words: Any) -> Sequence:
    return Sequence("r", 0, token_ids, len(token_ids), sampling=Sampling(**words), root_key=b"r" * 16)


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_what_followed_the_newest_tokens_is_proposed(make: Any) -> None:
    proposer, sequence = make(), sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2])
    assert proposer.propose(sequence, 8) == [], "two tokens are no match"
    sequence.append(3)
    assert proposer.propose(sequence, 2) == [4, 5]
    for token in (4, 5, 9, 1, 2, 3):
        sequence.append(token)
    assert proposer.propose(sequence, 3) == [4, 5, 9], "of two places the last one"


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
@pytest.mark.parametrize("period", [1, 2, 3, 4])
def test_a_loop_goes_on(make: Any, period: int) -> None:
    """Its newest tokens stand one turn before, which is shorter than a proposal."""
    loop = [7 + i % period for i in range(30)]
    assert make().propose(sequence_of(loop[:20]), 8) == loop[20:28]


def test_a_suffix_proposes_no_more_than_it_matches() -> None:
    tokens = [*range(10), 50, 7, 8, 9]
    assert NgramProposer().propose(sequence_of(tokens), 8) == [50, 7, 8, 9, 50, 7, 8, 9]
    assert SuffixProposer().propose(sequence_of(tokens), 8) == [50, 7, 8]
    long = [*range(10), 50, 51, 52, 53, *range(2, 10)]
    assert SuffixProposer().propose(sequence_of(long), 8) == [50, 51, 52, 53, 2, 3, 4, 5]


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_a_proposer_that_saw_each_token_proposes_as_one_made_now(make: Any) -> None:
    rng = np.random.default_rng(5)
    proposer, sequence = make(), sequence_of([0])
    for token in rng.integers(0, 3, 300).tolist():
        sequence.append(token)
        if rng.random() < 0.7:
            assert proposer.propose(sequence, 6) == make().propose(sequence, 6)


def drafts(speculator: Speculator, *sequences: Sequence) -> list[Draft]:
    return speculator.propose(list(sequences))


def test_bad_proposals_end_and_are_tried_again() -> None:
    speculator = Speculator(SpeculativeOptions(method="ngram", num_tokens=4), lambda decodes: 0.3)
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    lengths = []
    for _ in range(400):
        found = drafts(speculator, sequence)
        lengths.append(found[0].num_tokens if found else 0)
        for draft in found:
            speculator.verified(draft, 0)
    assert lengths[0] > 1, "they are worth it at first"
    assert lengths.index(0) < 10
    assert 0 < sum(lengths[20:]) < 20
    for _ in range(40):
        for draft in drafts(speculator, sequence):
            speculator.verified(draft, draft.num_tokens)
    assert drafts(speculator, sequence) == [] or drafts(speculator, sequence)[0].num_tokens >= 1


def test_new_sequences_begin_as_those_before_ended() -> None:
    speculator = Speculator(SpeculativeOptions(method="ngram", num_tokens=4), lambda decodes: 0.3)

    def first_length(right: bool) -> int:
        sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
        found = drafts(speculator, sequence)
        for _ in range(30):
            for draft in drafts(speculator, sequence):
                speculator.verified(draft, draft.num_tokens if right else 0)
        return found[0].num_tokens if found else 0

    lengths = [first_length(right=False) for _ in range(40)]
    assert lengths[0] > 1
    assert lengths[-1] == 0
    lengths = [first_length(right=True) for _ in range(300)]
    assert lengths[-1] == 4


def test_good_proposals_get_longer_and_costly_ones_are_not_made() -> None:
    costs = {1: 0.05, 2: 0.99}
    speculator = Speculator(
        SpeculativeOptions(method="ngram", num_tokens=16), lambda decodes: costs[len(decodes)]
    )
    sequence = sequence_of([*range(20), 0, 1, 2])
    before = drafts(speculator, sequence)[0].num_tokens
    for _ in range(10):
        speculator.verified(Draft(sequence, 23, [3, 4, 5]), 3)
    assert drafts(speculator, sequence)[0].num_tokens > before
    assert drafts(speculator, sequence, sequence_of([1])) == []


STEP_S, MISSING_S = 0.01, 0.25


class CostlyModel:
    """A draft model that lacks 25 steps' work of each new sequence."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.spent_s = 0.0

    def missing_s(self, sequence: Sequence) -> float:
        return 0.0 if id(sequence) in self.known else MISSING_S

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        self.spent_s += sum(self.missing_s(sequence) for sequence, _ in wanted)
        self.known |= {id(sequence) for sequence, _ in wanted}
        return [[1] * most for _, most in wanted]


@dataclass
class Decoded:
    num_tokens: int = 0
    num_steps: int = 0
    num_asked: int = 0
    seconds: float = 0.0


def decoded_with(
    model: CostlyModel, num_right: Callable[[Draft], int], num_tokens: int, row_cost: float = 0.1
) -> Decoded:
    """30 sequences one after another. ``row_cost``: the true one; 0.1 is estimated."""
    options, found = SpeculativeOptions(method="draft", num_tokens=4), Decoded()
    speculator = Speculator(options, lambda decodes: 0.1, lambda decodes: STEP_S, model)  # type: ignore[arg-type]
    for number in range(30):
        sequence = sequence_of([number, 2, 3], max_tokens=num_tokens)
        while sequence.num_output_tokens < num_tokens:
            before_s, num_new, step_s = model.spent_s, 1, STEP_S
            for draft in drafts(speculator, sequence):
                found.num_asked += 1
                speculator.verified(draft, num_right(draft))
                num_new += num_right(draft)
                step_s += row_cost * STEP_S * draft.num_tokens
            step_s += model.spent_s - before_s
            speculator.stepped([sequence], step_s)
            found.seconds += step_s
            found.num_steps += 1
            for _ in range(num_new):
                sequence.append(1)
        found.num_tokens += sequence.num_output_tokens
    return found


def test_a_draft_model_catches_up_where_that_pays_off() -> None:
    found = decoded_with(CostlyModel(), lambda draft: draft.num_tokens, 1000)
    assert found.num_asked >= 0.95 * found.num_steps
    assert found.seconds < 0.4 * found.num_tokens * STEP_S


@pytest.mark.parametrize(
    ("num_right", "num_tokens", "row_cost"), [(0, 1000, 0.1), (4, 20, 0.1), (1, 1000, 0.5), (2, 1000, 0.9)]
)
def test_a_draft_model_costs_no_more_than_it_has_saved(
    num_right: int, num_tokens: int, row_cost: float
) -> None:
    """But for a hundredth, and for 50 steps at first. It is never right, saves less than it lacks, or costs
    more than is estimated."""
    found = decoded_with(CostlyModel(), lambda draft: min(num_right, draft.num_tokens), num_tokens, row_cost)
    assert found.seconds <= (50 + 1.01 * found.num_tokens) * STEP_S + MISSING_S
    assert found.num_asked < found.num_steps / 10


def test_a_proposer_that_raises_is_not_asked_again() -> None:
    class Broken(NgramProposer):
        def propose(self, sequence: Sequence, most: int) -> list[int]:
            raise RuntimeError("broken")

    def failures() -> float:
        return REGISTRY.get_sample_value("moonpool_proposer_failures_total", {"method": "suffix"}) or 0.0

    speculator = Speculator(SpeculativeOptions(method="suffix"))
    sound, broken = (sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) for _ in range(2))
    assert [draft.sequence for draft in drafts(speculator, sound)] == [sound]
    speculator._make = Broken
    before = failures()
    for _ in range(3):
        assert drafts(speculator, broken) == []
    assert failures() == before + 1
    assert not speculator.may_draft([broken])
    assert [draft.sequence for draft in drafts(speculator, sound, broken)] == [sound]


@pytest.mark.parametrize(
    "words", [{"speculates": False}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}]
)
def test_some_sequences_decode_plainly(words: dict[str, Any]) -> None:
    speculator = Speculator(SpeculativeOptions(method="ngram"))
    sequence = sequence_of([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], **words)
    assert drafts(speculator, sequence) == []
    assert not speculator.may_draft([sequence])


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.speculative\.method.*engine\.parallel\.cp"):
        EngineOptions(parallel=ParallelOptions(cp=2), speculative=SpeculativeOptions(method="ngram"))


def speculating(driver: Any, method: str = "ngram", num_tokens: int = 5) -> Any:
    """From now on the driver's engine speculates, whatever a token costs on this machine."""
    driver.engine._scheduler.speculator = Speculator(SpeculativeOptions(method=method, num_tokens=num_tokens))
    return driver


SAMPLINGS = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "seed": 5, "top_k": 3},
    "drawn within": {"temperature": 1.2, "seed": 8, "top_p": 0.4, "min_p": 0.05},
    "logprobs": {"num_logprobs": 3},
    "bias": {"logit_bias": {7: 3.0, 9: 3.0}, "temperature": 0.3, "seed": 4},
    "min tokens": {"min_tokens": 60, "stop_token_ids": frozenset(range(0, 160, 2))},
    "stop": {"stop_token_ids": frozenset(range(0, 160, 5))},
    "penalties": {"presence_penalty": 0.4},
    "asked not to": {"speculates": False},
}


@pytest.mark.asyncio
@pytest.mark.parametrize("method", ["ngram", "suffix"])
async def test_tokens_are_those_of_plain_decoding(checkpoint, serve, method: str) -> None:
    words = [{"max_tokens": NUM_TOKENS, **words} for words in SAMPLINGS.values()]
    prompts = [prompt(20, seed=i) * 3 for i in range(len(words))]
    async with serve(checkpoint.path, max_batch_tokens=64) as driver:
        plain = await driver.run(*(driver.sequence(p, **w) for p, w in zip(prompts, words, strict=True)))
        num_plain, driver.num_steps = driver.num_steps, 0
        speculating(driver, method)
        results = await driver.run(*(driver.sequence(p, **w) for p, w in zip(prompts, words, strict=True)))
        for name, before, after in zip(SAMPLINGS, plain, results, strict=True):
            assert after.token_ids == before.token_ids, name
            assert after.finish_reason == before.finish_reason, name
            kinds = [event.logprobs is not None for event in after.events if event.token_id >= 0]
            assert all(kind == (name == "logprobs") for kind in kinds)
        one = await driver.run(driver.sequence(prompts[0], max_tokens=NUM_TOKENS))
        num_alone, driver.num_steps = driver.num_steps - num_plain, 0
    assert one[0].token_ids == plain[0].token_ids
    assert num_alone < num_plain


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "gpt-oss", "deepseek-v3"])
async def test_families_give_the_tokens_of_transformers(make_checkpoint, serve, family: str) -> None:
    kind, words = FAMILIES[family]
    reference = make_checkpoint(kind, **words)
    ids = prompt(24, seed=3) * 2
    async with serve(reference.path) as driver:
        speculating(driver)
        results = await driver.run(*(driver.sequence(ids, max_tokens=60) for _ in range(2)))
    assert all(result.token_ids == reference.greedy(ids, 60) for result in results)


@pytest.mark.asyncio
async def test_drawn_tokens_follow_the_models_distribution(checkpoint, serve) -> None:
    """Chi-squared over the second drawn token of many seeds, with speculation against without."""
    ids, num = prompt(12, seed=1) * 2, 400
    async with serve(checkpoint.path, max_batch_tokens=256, num_blocks=2048) as driver:

        async def drawn(first: int) -> Counter[int]:
            words = {"temperature": 0.8, "top_k": 4, "max_tokens": 12}
            sequences = [driver.sequence(ids, seed=first + i, **words) for i in range(num)]
            return Counter(result.token_ids[7] for result in await driver.run(*sequences))

        plain = await drawn(0)
        speculating(driver)
        speculated = await drawn(10_000)
    cells = [token for token in plain if plain[token] + speculated[token] >= 10]
    statistic = sum((plain[t] - speculated[t]) ** 2 / (plain[t] + speculated[t]) for t in cells)
    # The mean of the statistic is its degrees of freedom, its variance twice as much.
    assert statistic < len(cells) + 6 * np.sqrt(2 * len(cells))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_small_pool_preempts_and_nothing_leaks(checkpoint, serve) -> None:
    prompts = [prompt(16, seed=i) * 2 for i in range(6)]
    expected = checkpoint.greedy_each(prompts, 60)
    async with serve(checkpoint.path, num_blocks=34, max_batch_tokens=32, max_model_len=200) as driver:
        speculating(driver)
        results = await driver.run(*(driver.sequence(ids, max_tokens=60) for ids in prompts))
        assert [result.token_ids for result in results] == expected
        assert any(event.preempted for result in results for event in result.events)


@pytest.mark.asyncio
async def test_sealed_blocks_have_accepted_tokens_only(checkpoint, serve) -> None:
    """What a second turn finds cached gives the tokens that computing all gives."""
    ids = prompt(16, seed=2) * 3
    async with serve(checkpoint.path) as driver:
        speculating(driver, num_tokens=16)
        (first,) = await driver.run(driver.sequence(ids, max_tokens=80))
        again = ids + first.token_ids + prompt(5, seed=9)
        turn = driver.sequence(again, max_tokens=40)
        (second,) = await driver.run(turn)
    assert first.finish_reason == second.finish_reason == FinishReason.LENGTH
    assert turn.num_cached_tokens >= (len(ids) + 70) // 8 * 8
    assert second.token_ids == checkpoint.greedy(again, 40)


@pytest.mark.asyncio
async def test_the_option_turns_it_on(checkpoint, serve) -> None:
    options = replace(SpeculativeOptions(), method="suffix", num_tokens=3)
    async with serve(checkpoint.path, speculative=options) as driver:
        assert driver.engine._scheduler.speculator is not None
        (result,) = await driver.run(driver.sequence(prompt(30), max_tokens=50))
    assert result.token_ids == checkpoint.greedy(prompt(30), 50)
