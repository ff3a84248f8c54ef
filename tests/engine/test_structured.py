"""Token masks in the engine: what is sampled matches its structure, and other sequences do not notice."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.device.selection import choose_device
from moonpool.engine.execution.sampler import SamplingBatch, sample
from moonpool.kernels.dispatch import forbid_tokens
from moonpool.runtime.structure.automaton import Automaton
from moonpool.runtime.structure.grammars import Grammars, Structure

MODEL = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
EXPRESSION = r"[a-z]{3,9}( [a-z]{2,9}){2}\."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(MODEL, 2048, (1,))


class Fixed:
    """A matcher with one mask; after ``good`` tokens it fails."""

    def __init__(self, words: np.ndarray, good: int = 100) -> None:
        self.words, self.good = words, good

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        self.good -= len(sampled_tokens)
        return self.good >= 0

    def is_error(self) -> bool:
        return self.good < 0

    def get_error(self) -> str:
        return "it is broken"

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        assert trg_byte_size == self.words.nbytes
        ctypes.memmove(trg_pointer, self.words.ctypes.data, trg_byte_size)

    def deep_copy(self) -> Fixed:
        return Fixed(self.words, self.good)


def words_of(allowed: list[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[allowed] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2048, 32_001])
def test_bits_are_tokens(vocab_size: int, device: str) -> None:
    chosen = choose_device(device)
    rng = np.random.default_rng(vocab_size)
    allowed = rng.random((3, vocab_size)) < 0.5
    masks = np.stack([words_of(np.flatnonzero(row).tolist(), vocab_size) for row in allowed])
    scores = torch.randn(3, vocab_size, device=chosen.torch)
    expected = scores.cpu().clone().masked_fill_(torch.from_numpy(~allowed), float("-inf"))
    forbid_tokens(scores, chosen.upload(torch.from_numpy(masks)))
    assert torch.equal(scores.cpu(), expected)


@pytest.mark.parametrize("words", [{}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.8, "top_p": 0.5}])
def test_only_allowed_tokens_are_sampled_in_masked_rows(words: dict[str, Any]) -> None:
    vocab_size = 40
    allowed = words_of([3, 33], vocab_size)
    sequences = []
    for seed in range(50):
        sampling = Sampling(seed=seed, structure=Structure("regex", "x") if seed % 2 else None, **words)
        sequence = Sequence("r", seed, [1, 2], 2, sampling=sampling, root_key=b"")
        if seed % 2:
            sequence.automaton = Automaton(Fixed(allowed), vocab_size, [39])
            sequence.automaton.fill(np.empty(0, np.int32))
        sequences.append(sequence)
    logits = torch.randn(50, vocab_size, generator=torch.Generator().manual_seed(5))
    logits[:, 7] = 30.0
    tokens, _ = sample(logits, SamplingBatch(sequences, vocab_size, CpuDevice()))
    assert set(tokens[1::2].tolist()) <= {3, 33}
    assert set(tokens[::2].tolist()) == {7}


def test_ends_are_allowed_together_and_not_before_min_tokens() -> None:
    automaton = Automaton(Fixed(words_of([3, 5], 40)), 40, [5, 38])
    automaton.fill(np.empty(0, np.int32))
    assert np.array_equal(automaton.mask, words_of([3, 5, 38], 40))
    automaton.fill(np.empty(0, np.int32), may_end=False)
    assert np.array_equal(automaton.mask, words_of([3], 40))
    only_end = Automaton(Fixed(words_of([5], 40)), 40, [5, 38])
    only_end.fill(np.empty(0, np.int32), may_end=False)
    assert "no token" in only_end.error


async def structured(driver: Any, grammars: Grammars, kind: str, text: str, **words: Any) -> Sequence:
    structure = Structure(kind, text)
    sequence = driver.sequence([0, 2046, 300, 301], structure=structure, max_tokens=60, **words)
    sequence.automaton = await grammars.automaton(structure)
    return sequence


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.9, "seed": 1, "presence_penalty": 1.0, "num_logprobs": 2},
    ],
)
async def test_texts_match(
    serve: Any, grammars: Grammars, tokenizer: Tokenizer, words: dict[str, Any]
) -> None:
    async with serve(MODEL, dtype="float32") as driver:
        many = [await structured(driver, grammars, "regex", EXPRESSION, **words) for _ in range(3)]
        plain = driver.sequence([0, 2046, 300, 301], max_tokens=20, ignore_eos=True)
        (alone,) = await driver.run(driver.sequence([0, 2046, 300, 301], max_tokens=20, ignore_eos=True))
        *results, other = await driver.run(*many, plain)
        for result in results:
            assert result.finish_reason is FinishReason.STOP
            assert re.fullmatch(EXPRESSION, tokenizer.decode(result.token_ids)), result.token_ids
        assert other.token_ids == alone.token_ids, "a sequence without a structure is as it was"


async def test_a_structure_that_cannot_go_on_ends_with_its_own_error(serve: Any, grammars: Grammars) -> None:
    async with serve(MODEL, dtype="float32") as driver:
        broken = driver.sequence([0, 2046, 300], structure=Structure("regex", "x"), max_tokens=50)
        everything = np.full(64, -1, np.int32)
        broken.automaton = Automaton(Fixed(everything, good=3), 2048, [1])
        stuck = driver.sequence([0, 2046, 300], structure=Structure("regex", "x"), max_tokens=50)
        stuck.automaton = Automaton(Fixed(np.zeros(64, np.int32)), 2048, [1])
        well = await structured(driver, grammars, "regex", EXPRESSION)
        ended, never, good = await driver.run(broken, stuck, well)
        assert ended.finish_reason is never.finish_reason is FinishReason.ERROR
        assert len(ended.token_ids) <= 4
        assert "it is broken" in ended.events[-1].error
        assert never.token_ids == []
        assert "no token can come next" in never.events[-1].error
        assert good.finish_reason is FinishReason.STOP


async def test_a_length_may_end_it(serve: Any, grammars: Grammars) -> None:
    async with serve(MODEL, dtype="float32") as driver:
        sequence = await structured(driver, grammars, "regex", "[a-z]{400}")
        (result,) = await driver.run(sequence)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == 60


@pytest.mark.slow
async def test_preempted_sequences_are_the_same(serve: Any, grammars: Grammars) -> None:
    async def texts(num_blocks: int) -> tuple[list[list[int]], int]:
        async with serve(MODEL, dtype="float32", num_blocks=num_blocks, max_model_len=128) as driver:
            some = [
                await structured(driver, grammars, "regex", "[a-z ]{200,}", temperature=1.0, seed=seed)
                for seed in range(4)
            ]
            results = await driver.run(*some)
            return [result.token_ids for result in results], sum(s.num_preemptions for s in some)

    expected, none = await texts(128)
    again, some = await texts(20)
    assert none == 0
    assert some > 0
    assert again == expected


@pytest.mark.parametrize("count", [1, 4, 9])
async def test_a_sequence_goes_on_from_its_tokens(serve: Any, grammars: Grammars, count: int) -> None:
    """As after the death of a node: the automaton is built anew."""
    words: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    async with serve(MODEL, dtype="float32") as driver:
        (whole,) = await driver.run(await structured(driver, grammars, "regex", EXPRESSION, **words))
        tokens, structure = whole.token_ids[:count], Structure("regex", EXPRESSION)
        rest = driver.sequence(
            [0, 2046, 300, 301, *tokens], num_prompt_tokens=4, structure=structure, max_tokens=60, **words
        )
        rest.automaton = await grammars.automaton(structure, np.array(tokens, np.int32))
        driver.results[rest.key] = type(whole)(token_ids=list(tokens))
        (result,) = await driver.run(rest)
        assert result.token_ids == whole.token_ids
