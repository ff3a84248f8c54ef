"""Launch parameters of the attention kernels on a GPU: tiles, warps and stages.

The table is ``launch.json``; nothing is measured while serving. ``python -m moonpool.bench.kernels.tune``
measures the candidates on a GPU and rewrites the table. ``moonpool.kernels.compilation`` checks every row
without a GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

TABLE_PATH = Path(__file__).with_name("launch.json")
# Query rows of a program over latents.
LATENT_ROWS = 16
# Multiprocessors assumed without a GPU: those of an H200.
ASSUMED_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """tile: keys of a step; programs_per_multiprocessor: resident at once."""

    tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """rows: query rows of a program; tile: keys of a step."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int


def kind_of(q_dtype: torch.dtype, pool_dtype: torch.dtype) -> str:
    """The dtypes as the table distinguishes them: ``wide`` (float32), ``half`` or ``fp8`` pools."""
    if q_dtype.itemsize == 4:
        return "wide"
    return "fp8" if pool_dtype.itemsize == 1 else "half"


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """``{"decode": rows, "prefill": rows}``.

    A row is valid from ``arch`` on, up to ``head_dim``, and for decode up to ``rows`` (query tokens times
    heads that share a kv head).
    """
    found: dict[str, list[dict[str, Any]]] = json.loads(TABLE_PATH.read_text())
    return found


def _row(of: str, kind: str, head_dim: int, arch: int, rows: int = 0) -> dict[str, Any]:
    fits = [
        row
        for row in table()[of]
        if row["kind"] == kind
        and row["arch"] <= arch
        and row["head_dim"] >= head_dim
        and row.get("rows", rows) >= rows
    ]
    # The tightest fit of the newest architecture.
    return min(fits, key=lambda row: (-row["arch"], row["head_dim"], row.get("rows", 0)))["choice"]  # type: ignore[no-any-return]


@cache
def decode_choice(
    head_dim: int, rows: int, q_dtype: torch.dtype, pool_dtype: torch.dtype, arch: int
) -> DecodeChoice:
    """rows: query tokens of a sequence times heads that share a kv head, padded to a power of two."""
    return DecodeChoice(**_row("decode", kind_of(q_dtype, pool_dtype), head_dim, arch, rows))


@cache
def prefill_choice(head_dim: int, q_dtype: torch.dtype, pool_dtype: torch.dtype, arch: int) -> PrefillChoice:
    return PrefillChoice(**_row("prefill", kind_of(q_dtype, pool_dtype), head_dim, arch))


@cache
def architecture(device: torch.device) -> int:
    """The compute capability as one number; 90 where there is no GPU (the interpreter)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def heads_of_latents(num_heads: int, queries: int = 1) -> int:
    """The kv heads that query heads over one latent are divided into: all read the same memory, and the
    accumulators of so many query rows of a latent's width fit into registers."""
    group = max(1, LATENT_ROWS // queries)
    return num_heads // next(n for n in range(min(group, num_heads), 0, -1) if num_heads % n == 0)


def padded(n: int, least: int = 1) -> int:
    """The next power of two, as Triton's ranges require."""
    return max(least, 1 << (n - 1).bit_length())
