"""What fewer bits cost the shipped model on a text that it has not seen."""

from __future__ import annotations

import pytest

from moonpool.bench.engine.perplexity import VARIANTS, perplexity

# Of the perplexity with plain weights: 1.001, 1.012 and 1.002 were measured. A weight is off by half a step
# at most: 2^-8 of the largest in its row with 8 bits, 2^-4 of the largest in its group with 4.
BOUNDS = {"int8 weights": 1.01, "int4 weights": 1.05, "fp8_e4m3 KV": 1.01, "int8 KV": 1.003}


@pytest.mark.slow
async def test_perplexity_is_bounded() -> None:
    plain, num_tokens = await perplexity(VARIANTS["plain weights"])
    assert num_tokens > 1000
    assert plain < 300
    for name, bound in BOUNDS.items():
        few, _ = await perplexity(VARIANTS[name])
        assert few / plain == pytest.approx(1, abs=bound - 1), name
