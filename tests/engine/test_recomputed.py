"""A request computed again from its tokens, as after the loss of its node or cell: is it the same to the bit?

Only attention rounds otherwise. The first time, an output token is computed in a decode step, whose kernel
sums in another order than prefills do, which compute it the second time. With one kernel, nothing differs.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from moonpool.engine.device.device import CpuDevice
from moonpool.kernels.cpu.library import load
from moonpool.kernels.dispatch import paged_prefill_attention
from tests.engine.conftest import Driver, Result, prompt

if load() is None:
    pytest.skip("this machine has no kernels in C++", allow_module_level=True)

NUM_TOKENS = 90
CUTS = (17, 40, 73)  # what is known of them when the request begins again
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7}]


async def run(driver: Driver, tokens: list[int], known: list[int], salt: int, **sampling: Any) -> Result:
    """The tokens after ``known``, with their log-probabilities. ``salt``: nothing of others is cached."""
    sequence = driver.sequence(
        tokens + known,
        num_prompt_tokens=len(tokens),
        root_key=bytes([salt]) * 16,
        max_tokens=NUM_TOKENS,
        num_logprobs=0,
        **sampling,
    )
    driver.results[sequence.key] = Result(token_ids=list(known))
    (result,) = await driver.run(sequence)
    return result


def logprobs(result: Result) -> list[float]:
    return [event.logprobs.logprob for event in result.events if event.logprobs is not None]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_only_decode_and_prefill_attention_round_differently(
    checkpoint, serve_on, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(50)
    async with serve_on(CpuDevice(), checkpoint.path, dtype="float32", max_batch_tokens=32) as driver:
        whole = await run(driver, tokens, [], 0, **sampling)
        moved = []
        for cut in CUTS:
            again = await run(driver, tokens, whole.token_ids[:cut], cut, **sampling)
            moved.append(abs(logprobs(again)[0] - logprobs(whole)[cut]))
        assert 0 < max(moved) < 1e-4

    def as_decode(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return paged_prefill_attention(q, *arguments, **options | {"max_q_len": len(q)})

    # Now decode's kernel computes prefills, too.
    monkeypatch.setattr("moonpool.kernels.cpu.operations._MAX_DECODE_ROWS", 1 << 20)
    monkeypatch.setattr("moonpool.engine.model.attention.paged_prefill_attention", as_decode)
    async with serve_on(CpuDevice(), checkpoint.path, dtype="float32", max_batch_tokens=32) as driver:
        whole = await run(driver, tokens, [], 0, **sampling)
        for cut in CUTS:
            again = await run(driver, tokens, whole.token_ids[:cut], cut, **sampling)
            assert again.token_ids == whole.token_ids
            assert logprobs(again) == logprobs(whole)[cut:], "to the bit"


async def test_other_requests_in_its_steps_change_no_bit(checkpoint, serve_on) -> None:
    tokens = prompt(50)
    async with serve_on(CpuDevice(), checkpoint.path, dtype="float32", max_batch_tokens=32) as driver:
        alone = await run(driver, tokens, [], 0)
        others = [driver.sequence(prompt(30 + n, seed=n), max_tokens=60) for n in range(6)]
        for one in others:
            driver.engine.add(one)
        together = await run(driver, tokens, [], 1)
        await driver.until(lambda: all(driver.results[one.key].finish_reason for one in others))
        assert together.token_ids == alone.token_ids
        assert logprobs(together) == logprobs(alone), "to the bit"
