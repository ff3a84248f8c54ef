"""Every operation once, on a batch with a known answer: all keys are equal, attention gives the mean of V."""

from __future__ import annotations

import logging

import torch

from moonpool.kernels import dispatch, reference
from moonpool.kernels.packed import PackedLinear
from moonpool.kernels.quantised import QuantisedLinear
from moonpool.kernels.report import backend_report

logging.basicConfig(format="%(levelname)s %(message)s")
pool = torch.full((4, 1, 2, 1, 8, 16), float("nan"))
slots, positions = torch.arange(8, 18), torch.zeros(10, dtype=torch.int64)
cos, sin = torch.ones(1, 8), torch.zeros(1, 8)
q = dispatch.rotate_and_write(
    torch.ones(10, 3 * 16), positions, cos, sin, pool, 0, slots, num_heads=1, num_kv_heads=1, head_dim=16
)
table, lens = torch.tensor([[1, 2, -1]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32)
out = dispatch.paged_decode_attention(q[-1:], pool, 0, table, lens, scale=1.0)
assert torch.allclose(out, torch.ones_like(out)), out
starts = torch.tensor([0, 10], dtype=torch.int32)
out = dispatch.paged_prefill_attention(q, pool, 0, table, starts, lens, scale=1.0)
assert torch.allclose(out, torch.ones_like(out)), out
dispatch.write_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), pool, 0, torch.tensor([0]))
x = torch.ones(2, 16)
assert torch.allclose(dispatch.rms_norm(x, torch.ones(16), 0.0), x)
assert dispatch.silu_mul(x).shape == (2, 8)
assert dispatch.argmax_rows(torch.eye(3)).tolist() == [0, 1, 2]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    linear = PackedLinear(torch.eye(16).to(dtype), torch.zeros(16).to(dtype))
    y = linear(x.to(dtype))
    assert y.dtype == dtype and torch.equal(y, x.to(dtype))
for kind, group in (("int8", 0), ("int4", 8), ("int4", 3)):
    weight = reference.QuantisedWeight.of(torch.eye(16), kind, group)
    y = QuantisedLinear(weight, torch.zeros(16))(torch.eye(16))
    assert torch.allclose(y, torch.eye(16), atol=1e-4), y
report = backend_report()["cpu"]
print(report["form"], "|", report["reason"])
