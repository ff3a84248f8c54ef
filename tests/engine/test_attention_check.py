"""Before an engine on a GPU serves, its attention is compared with the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moonpool.engine.errors import WrongKernel
from moonpool.engine.execution import attention_check
from tests.engine.late_device import LateDevice


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
async def test_right_kernels_pass(make_checkpoint: Any, serve_on: Any, family: str, kv_dtype: str) -> None:
    checked: list[int] = []
    definition = attention_check.check_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "moonpool.engine.execution.runner.check_attention",
            lambda *arguments: checked.append(definition(*arguments) or 1),
        )
        async with serve_on(LateDevice(), make_checkpoint(family).path, kv_dtype=kv_dtype):
            assert checked == [1]


@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.parametrize("wrong", [float("nan"), 1.1])
async def test_a_wrong_kernel_is_refused(
    checkpoint: Any, serve_on: Any, monkeypatch: pytest.MonkeyPatch, what: str, wrong: float
) -> None:
    name = f"paged_{what}_attention"
    right = getattr(attention_check, name)

    def form(*arguments: Any, **words: Any) -> torch.Tensor:
        out: torch.Tensor = right(*arguments, **words)
        out[0, 0] *= wrong
        out[-1, -1] *= wrong
        return out + 0.2 * (wrong > 1)

    monkeypatch.setattr(attention_check, name, form)
    with pytest.raises(WrongKernel, match=f"{what} attention with heads of 16"):
        async with serve_on(LateDevice(), checkpoint.path):
            pass
