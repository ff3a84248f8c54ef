"""``transformers`` generating in a child process."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers


class Generator:
    def __init__(self, model_dir: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        # Any: its annotations need type arguments that do not exist.
        auto: Any = transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: list[list[int]], output_tokens: int) -> float:
        """Seconds of one call. The prompts have the same length."""
        ids = torch.tensor(prompts)
        began_s = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began_s
        assert out.shape[1] == ids.shape[1] + output_tokens
        return seconds
