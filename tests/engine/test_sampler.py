"""What is drawn, from what, and that it depends on nothing but the request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.execution.sampler import SamplingBatch, describe, exponential, sample, stream_keys
from moonpool.protos import node_pb2
from tests.lazily import Lazily

theirs = Lazily("transformers.generation.logits_process")

VOCAB = 40
CPU = CpuDevice()


def request(tokens: list[int], num_prompt_tokens: int | None = None, **words: Any) -> Sequence:
    return Sequence(
        "r",
        0,
        tokens,
        num_prompt_tokens or len(tokens),
        sampling=Sampling(**words),
        root_key=b"",
    )


def draw_many(logits: torch.Tensor, n: int = 20000, **words: Any) -> torch.Tensor:
    """How often each token was drawn, as a share, over n seeds."""
    batch = SamplingBatch([request([1], seed=seed, **words) for seed in range(n)], VOCAB, CPU)
    tokens, _ = sample(logits.expand(n, -1), batch)
    return torch.bincount(tokens, minlength=VOCAB) / n


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 10 * VOCAB},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_transformers_means(words: dict[str, Any]) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    scores = logits / words["temperature"]
    if words.get("min_p"):
        scores = theirs.MinPLogitsWarper(words["min_p"])(None, scores)
    if words.get("top_k"):
        scores = theirs.TopKLogitsWarper(words["top_k"])(None, scores)
    if words.get("top_p"):
        scores = theirs.TopPLogitsWarper(words["top_p"])(None, scores)
    expected = scores.softmax(-1)[0]
    actual = draw_many(logits, **words)
    assert not actual[expected == 0].any(), "a token that is cut off was drawn"
    # Five standard deviations of a share over 20,000 draws.
    assert ((actual - expected).abs() <= 5 * (expected * (1 - expected) / 20000).sqrt() + 1e-9).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {},
        {"temperature": 2.0, "top_k": 7, "presence_penalty": 1.0},
        {"temperature": 1.0, "min_p": 0.3, "num_logprobs": 2},
        {"repetition_penalty": 1.3},
    ]
    requests = [request([3, 4, 5], 1, seed=100 + i, **kind) for i, kind in enumerate(kinds)]
    together = sample(logits, SamplingBatch(requests, VOCAB, CPU))[0].tolist()
    for i, one in enumerate(requests):
        assert sample(logits[i : i + 1], SamplingBatch([one], VOCAB, CPU))[0].tolist() == [together[i]]


def test_random_numbers_are_a_function_of_seed_index_and_token() -> None:
    index = np.arange(1000, dtype=np.uint64)
    keys = np.stack([stream_keys(np.full(1000, seed, np.uint64), index) for seed in range(100)])
    assert len(np.unique(keys)) > 0.9999 * keys.size
    waits = exponential(torch.from_numpy(keys[:5].reshape(-1, 1)), 1000).double().numpy()
    assert waits.min() > 0
    assert waits.max() < 17
    assert abs(waits.mean() - 1) < 0.003
    assert abs(waits.var() - 1) < 0.01
    # Neither of neighbouring indices nor of neighbouring tokens.
    for one, other in ((waits[:-1], waits[1:]), (waits[:, :-1], waits[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.003
    # Requests continue on nodes of another version: they change with a reason only.
    seven = torch.from_numpy(stream_keys(np.array([7], np.uint64), np.array([3], np.uint64))[:, None])
    assert exponential(seven, 3)[0].tolist() == pytest.approx([0.54373, 1.25605, 0.37883], abs=1e-5)


def test_rounding_seldom_changes_a_draw() -> None:
    rows, words = 1000, 2048
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, words, generator=random) * 3
    batch = SamplingBatch([request([1], seed=seed, temperature=1.0) for seed in range(rows)], words, CPU)
    drawn, _ = sample(logits, batch)
    again, _ = sample(logits + torch.randn(rows, words, generator=random) * 1e-3, batch)
    assert (drawn != logits.argmax(-1)).sum() > rows / 2
    # A search in the cumulative distribution changes 39 of them.
    assert (drawn != again).sum() <= 5


def test_penalties_count_what_openai_and_transformers_count() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    tokens = [1, 2, 2, 3, 3, 3, 4]
    one = request(tokens, 3, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.3)
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    for token, count in {3: 3, 4: 1}.items():
        expected[0, token] -= 0.4 * count - 0.3
    ((_, _, batch),) = SamplingBatch([one], VOCAB, CPU).groups
    torch.testing.assert_close(batch.adjust(logits), expected)
    # The same tensors go on counting as tokens come.
    one.append(4)
    expected[0, 4] -= 0.4
    torch.testing.assert_close(batch.adjust(logits), expected)


def test_min_tokens_holds_stop_tokens_back_and_bias_is_added() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    one = request([1], min_tokens=2, stop_token_ids=frozenset({9}), logit_bias={7: 3.0, 8: -100.0})
    one.stop_ids = frozenset({9})
    batch = SamplingBatch([one], VOCAB, CPU)
    for expected in (7, 7, 9):
        assert sample(logits, batch)[0].tolist() == [expected]
        one.append(expected)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3))
    raw = logits.log_softmax(-1)
    wanted = request([1], temperature=3.0, logit_bias={5: 50.0}, num_logprobs=3)
    batch = SamplingBatch([request([1]), wanted], VOCAB, CPU)
    tokens, logprobs = sample(logits, batch)
    assert tokens.tolist() == [int(logits[0].argmax()), 5]
    assert logprobs[0] is None
    entry = logprobs[1]
    assert entry is not None
    assert entry.logprob == pytest.approx(float(raw[1, 5]))
    assert entry.rank == int((raw[1] > raw[1, 5]).sum()) + 1
    best = raw[1].topk(3)
    assert (entry.top_ids, entry.top_logprobs) == (best.indices.tolist(), pytest.approx(best.values.tolist()))
    (alone,) = describe(logits[1:], torch.tensor([5]), [0])
    assert (alone.top_ids, alone.logprob) == ([], entry.logprob)


def test_sampling_from_its_message() -> None:
    message = node_pb2.Sampling(
        temperature=0.5, seed=2**63, max_tokens=4, logit_bias={3: 1.0}, num_logprobs=-1
    )
    sampling = Sampling.from_proto(message)
    assert (sampling.top_p, sampling.repetition_penalty, sampling.seed) == (1.0, 1.0, 2**63)
    assert sampling.logit_bias == {3: 1.0}
    assert not sampling.plain_greedy
    assert Sampling.from_proto(node_pb2.Sampling(num_logprobs=-1)).plain_greedy


async def test_a_seeded_request_continues_exactly_elsewhere(make_checkpoint, serve) -> None:
    words = {"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    checkpoint = make_checkpoint("llama")
    prompt = [5, 6, 7, 8, 9, 10, 11]
    async with serve(checkpoint.path) as driver:
        one = driver.sequence(prompt, seed=42, max_tokens=30, **words)
        (whole,) = await driver.run(one)
        others = [driver.sequence(prompt, seed=seed, max_tokens=30, **words) for seed in range(3)]
        results = await driver.run(*others)
        assert len({tuple(r.token_ids) for r in [whole, *results]}) == 4, "another seed, another text"
    async with serve(checkpoint.path, block_size=16) as driver:
        begun = driver.sequence(
            prompt + whole.token_ids[:13], num_prompt_tokens=len(prompt), seed=42, max_tokens=30, **words
        )
        driver.results[begun.key] = type(whole)(token_ids=whole.token_ids[:13])
        rest, *_ = await driver.run(begun, driver.sequence([1, 2], seed=1, max_tokens=9, **words))
        assert rest.token_ids == whole.token_ids


async def test_sequences_end_where_they_were_told(make_checkpoint, serve) -> None:
    checkpoint = make_checkpoint("llama")
    prompt = list(range(20, 30))
    greedy = checkpoint.greedy(prompt, 12)
    stop = greedy[4]
    first = greedy.index(stop)
    async with serve(checkpoint.path, max_model_len=16) as driver:
        stopped = driver.sequence(prompt, max_tokens=12, stop_token_ids=frozenset({stop}))
        long = driver.sequence(prompt, max_tokens=12)
        short = driver.sequence(prompt, max_tokens=3)
        results = await driver.run(stopped, long, short)
    assert [r.finish_reason for r in results] == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]
    assert results[0].token_ids == greedy[: first + 1], "the stop token itself is reported"
    assert results[1].token_ids == greedy[:6], "the model's length ends it"
    assert results[2].token_ids == greedy[:3]
