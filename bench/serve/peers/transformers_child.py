"""``transformers`` generating in a process of its own: reads a JSON line, generates, answers a JSON line.

    python -m moonpool.bench.serve.peers.transformers_child MODEL DTYPE THREADS

Asked ``{"prompts": [[id, …], …], "output_tokens": n}`` (prompts of one length), it answers ``{"seconds": s}``
of the whole ``generate`` call. The first line it prints, before any question, is ``{"ready": version}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(model_dir: str, dtype: str, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    # Any: its annotations want type arguments that nobody has.
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    model.eval()
    print(json.dumps({"ready": transformers.__version__}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        ids = torch.tensor(question["prompts"])
        count = question["output_tokens"]
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        assert out.shape[1] == ids.shape[1] + count
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
