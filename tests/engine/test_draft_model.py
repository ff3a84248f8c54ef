"""A smaller model as proposer: the tokens are those of plain decoding, and its own KV is right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.engine.batching.step_plan import StepOutput, StepPlan
from moonpool.engine.speculation.draft_model import DraftModel
from moonpool.errors import ConfigError
from moonpool.runtime.config.engine_options import SpeculativeOptions
from moonpool.runtime.config.options import ModelOptions
from tests.engine.conftest import Driver, Reference, prompt, proposing

NUM_TOKENS = 50
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "seed": 5, "top_k": 3},
    "drawn within": {"temperature": 1.2, "seed": 8, "top_p": 0.4, "min_p": 0.05},
    "logprobs": {"num_logprobs": 3},
    "bias": {"logit_bias": {7: 3.0, 9: 3.0}, "temperature": 0.3, "seed": 4},
    "min tokens": {"min_tokens": 30, "stop_token_ids": frozenset(range(0, 160, 2))},
    "penalties": {"presence_penalty": 0.4},
    "asked not to": {"speculates": False},
}


def by(draft: Reference, **words: Any) -> SpeculativeOptions:
    return SpeculativeOptions(method="draft", draft_path=str(draft.path), **words)


def model_of(driver: Driver) -> DraftModel:
    """The driver's draft model. From now on it proposes, whatever a token costs on this machine."""
    model = proposing(driver.engine)._model
    assert model is not None
    return model


def requests(driver: Driver, **more: Any) -> list[Any]:
    return [
        driver.sequence(prompt(5 + 9 * i, i), **{"max_tokens": NUM_TOKENS, **words, **more})
        for i, words in enumerate(SAMPLINGS.values())
    ]


@pytest.fixture
def other(make_checkpoint) -> Reference:
    """A smaller model of the same vocabulary, with random weights: it is hardly ever right."""
    return make_checkpoint("qwen3", num_hidden_layers=1)


@pytest.mark.asyncio
@pytest.mark.parametrize("pool_nbytes", [16 << 20, 100_000], ids=["large pool", "small pool"])
async def test_tokens_are_those_of_plain_decoding(checkpoint, other, serve, pool_nbytes: int) -> None:
    async with serve(checkpoint.path, max_batch_tokens=64) as driver:
        plain = await driver.run(*requests(driver))
    for draft in (checkpoint, other):
        options = by(draft, pool_nbytes=pool_nbytes, num_tokens=5)
        async with serve(checkpoint.path, max_batch_tokens=64, speculative=options) as driver:
            model = model_of(driver)
            results = await driver.run(*requests(driver))
            model.check_integrity()
            again = await driver.run(*requests(driver))
        for name, before, *after in zip(SAMPLINGS, plain, results, again, strict=True):
            assert all(result.token_ids == before.token_ids for result in after), name
            assert all(result.finish_reason == before.finish_reason for result in after), name


@pytest.mark.asyncio
async def test_a_draft_with_the_same_weights_is_always_right(checkpoint, serve) -> None:
    """So its KV is that of the accepted tokens, after prompts, rejections, pauses and cached blocks."""
    async with serve(checkpoint.path, speculative=by(checkpoint), max_batch_tokens=64) as driver:
        model_of(driver)
        for ids in (prompt(9), prompt(150, 1), prompt(150, 1) + prompt(20, 2), prompt(9)):
            for name in ("greedy", "drawn", "bias", "min tokens"):
                driver.num_steps = 0
                (result,) = await driver.run(
                    driver.sequence(ids, max_tokens=41, ignore_eos=True, **SAMPLINGS[name])
                )
                tokens = [event for event in result.events if event.token_id >= 0]
                num_chunks = -(-len(ids) // 64)
                # A prompt in several steps is computed by the draft in as many. The first token is the
                # prefill's; then a step has 5, of which 4 are the draft's.
                assert driver.num_steps <= 2 * num_chunks + 8
                assert sum(event.accepted for event in tokens) >= (len(tokens) - 1 - num_chunks) // 5 * 4


@pytest.mark.asyncio
async def test_wrong_proposals_leave_no_trace_in_its_kv(checkpoint, serve, monkeypatch) -> None:
    async with serve(checkpoint.path, speculative=by(checkpoint)) as driver:
        model = model_of(driver)
        propose, execute, num_rounds, is_first = model.propose, model._runner.execute, 0, False

        def counted(wanted: Any) -> list[list[int]]:
            nonlocal num_rounds, is_first
            num_rounds, is_first = num_rounds + 1, True
            return propose(wanted)

        def often_wrong(plan: StepPlan) -> StepOutput:
            nonlocal is_first
            output = execute(plan)
            if is_first and num_rounds % 2:
                output.token_ids = [(token + 1) % 160 for token in output.token_ids]
            is_first = False
            return output

        monkeypatch.setattr(model, "propose", counted)
        monkeypatch.setattr(model._runner, "execute", often_wrong)
        monkeypatch.setattr("moonpool.engine.speculation.speculator._GAIN", 0.0)
        results = await driver.run(*(driver.sequence(prompt(9, i), max_tokens=60) for i in range(3)))
    for i, result in enumerate(results):
        assert result.token_ids == checkpoint.greedy(prompt(9, i), 60)
        # Of every second proposal all are right.
        assert sum(event.accepted for event in result.events) >= 24


@pytest.mark.asyncio
async def test_blocks_of_ended_and_preempted_sequences_are_released(checkpoint, other, serve) -> None:
    prompts = [prompt(16, seed=i) * 2 for i in range(6)]
    expected = checkpoint.greedy_each(prompts, 60)
    words = {"num_blocks": 34, "max_batch_tokens": 32, "max_model_len": 200}
    async with serve(checkpoint.path, speculative=by(other), **words) as driver:
        model = model_of(driver)
        results = await driver.run(*(driver.sequence(ids, max_tokens=60) for ids in prompts))
        assert [result.token_ids for result in results] == expected
        assert any(event.preempted for result in results for event in result.events)
        await driver.run(driver.sequence(prompt(5), max_tokens=9))
        model.check_integrity()
        assert len(model._copies) <= 1


@pytest.mark.asyncio
async def test_an_error_ends_the_proposals_of_its_sequences_only(checkpoint, serve, monkeypatch) -> None:
    def failures() -> float:
        return REGISTRY.get_sample_value("moonpool_proposer_failures_total", {"method": "draft"}) or 0.0

    async with serve(checkpoint.path, speculative=by(checkpoint)) as driver:
        model, before = model_of(driver), failures()
        execute = model._runner.execute
        monkeypatch.setattr(model._runner, "execute", lambda plan: 1 / 0)
        first, second = await driver.run(
            driver.sequence(prompt(9), max_tokens=20), driver.sequence(prompt(8), max_tokens=20)
        )
        assert failures() == before + 2
        monkeypatch.setattr(model._runner, "execute", execute)
        (third,) = await driver.run(driver.sequence(prompt(9), max_tokens=20))
        model.check_integrity()
    assert first.token_ids == third.token_ids == checkpoint.greedy(prompt(9), 20)
    assert second.token_ids == checkpoint.greedy(prompt(8), 20)
    assert not any(event.accepted for event in first.events + second.events)
    assert sum(event.accepted for event in third.events) >= 12


@pytest.mark.asyncio
async def test_it_turns_itself_off_where_a_proposal_costs_too_much(checkpoint, serve) -> None:
    async with serve(checkpoint.path, speculative=by(checkpoint)) as driver:
        speculator = proposing(driver.engine)
        speculator._row_cost = lambda decodes: 0.7
        (result,) = await driver.run(driver.sequence(prompt(9), max_tokens=40))
        assert not any(event.accepted for event in result.events)
        assert speculator._model is not None
        assert not speculator._model._copies


def write_tokenizer(directory: Path, vocab: dict[str, int], added: dict[str, int]) -> None:
    content = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": [{"id": i, "content": word} for word, i in added.items()],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))


def copied(reference: Reference, directory: Path) -> Reference:
    directory.mkdir()
    for file in reference.path.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return replace(reference, path=directory)


@pytest.mark.asyncio
async def test_a_draft_of_other_tokens_is_refused(make_checkpoint, serve_on, tmp_path) -> None:
    from moonpool.engine.device.device import CpuDevice

    served = copied(make_checkpoint("llama"), tmp_path / "served")
    draft = copied(make_checkpoint("qwen3", num_hidden_layers=1), tmp_path / "draft")
    write_tokenizer(served.path, {"a": 0, "b": 1}, {"<end>": 2})

    async def refused(path: Path, why: str) -> None:
        options = SpeculativeOptions(method="draft", draft_path=str(path))
        with pytest.raises(ConfigError, match=why) as error:
            async with serve_on(CpuDevice(), served.path, speculative=options):
                pass
        assert error.value.key == "engine.speculative.draft_path"
        assert str(path) in str(error.value)

    larger = make_checkpoint("llama", vocab_size=168)
    await refused(larger.path, r"engine\.speculative\.draft_path.*vocab_size")
    await refused(tmp_path / "nowhere", r"no config\.json")
    await refused(draft.path, "tokenizer")
    for vocab, added in (({"a": 1, "b": 0}, {"<end>": 2}), ({"a": 0, "b": 1}, {"<end>": 3})):
        write_tokenizer(draft.path, vocab, added)
        await refused(draft.path, "tokenizer")
    write_tokenizer(draft.path, {"b": 1, "a": 0}, {"<end>": 2})
    async with serve_on(CpuDevice(), served.path, speculative=by(draft)) as driver:
        (result,) = await driver.run(driver.sequence(prompt(9), max_tokens=9))
        assert result.token_ids == served.greedy(prompt(9), 9)


@pytest.mark.asyncio
async def test_the_small_model_that_ships_drafts_for_the_large_one(serve_on) -> None:
    """Its tokens are often right: more than 1.3 tokens a step."""
    from moonpool.engine.device.device import CpuDevice

    path = ModelOptions().directory
    options = SpeculativeOptions(method="draft", num_tokens=3)
    ids = [300 + i for i in range(12)]
    async with serve_on(CpuDevice(), path, num_blocks=0) as driver:
        plain = await driver.run(driver.sequence(ids, max_tokens=100, ignore_eos=True))
    async with serve_on(CpuDevice(), path, num_blocks=0, speculative=options) as driver:
        model_of(driver)
        (result,) = await driver.run(driver.sequence(ids, max_tokens=100, ignore_eos=True))
    assert result.token_ids == plain[0].token_ids
    num_accepted = sum(event.accepted for event in result.events)
    assert 100 / (100 - num_accepted) > 1.3
