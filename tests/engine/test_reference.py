"""What engines are compared with says the same whatever an engine said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine import conftest
from tests.engine.conftest import Reference, prompt


def one_by_one(reference: Reference, token_ids: list[int], n: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(n):
        ids.append(int(reference.logprobs(ids)[-1].argmax()))
    return ids[len(token_ids) :]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2"])
def test_drafts_change_no_token(make_checkpoint: Callable[..., Reference], monkeypatch, family: str) -> None:
    reference, prompts, n = make_checkpoint(family), [prompt(5 + 9 * i, i) for i in range(4)], 12
    expected = [one_by_one(reference, ids, n) for ids in prompts]
    right, late, short, wrong = (list(tokens) for tokens in expected)
    late[7] = (late[7] + 1) % 160
    wrong = [(token + 1) % 160 for token in wrong]
    drafts = [[*right, 3, 4], late, short[:5], wrong]
    said = {tuple(ids): draft for ids, draft in zip(prompts, drafts, strict=True)}
    for known in ({}, said):
        monkeypatch.setattr(conftest, "_said", known)
        fresh = Reference(reference.path, reference.model)
        assert fresh.greedy_each(prompts[:2], 3) == [tokens[:3] for tokens in expected[:2]]
        assert fresh.greedy_each([*prompts, prompts[1]], n) == [*expected, expected[1]]
        assert fresh.greedy(prompts[3], 1) == expected[3][:1]
