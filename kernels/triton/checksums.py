"""Triton form of the checksums of memory: xxh3-64. Its sums over 1 KiB are independent of each other.

Every KiB but the last is summed in parallel, at the speed of memory. Then one program a span chains these
sums: 8 lanes, a few instructions a KiB. Spans that the parallel form does not suit go to the plain one.
"""

# Triton is untyped, and its compile-time constants are capitals.
# mypy: disable-error-code="import-untyped,untyped-decorator,no-untyped-def"
# ruff: noqa: N803

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moonpool.kernels import reference

KIBS_PER_PROGRAM = 8
KIBS_PER_TURN = 16  # of the chain: their loads are issued together
_MIN_NBYTES = 241  # shorter input has another form in xxh3
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_LAST_KEY, _MERGE_KEY = 121, 11  # offsets in the secret
_START = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)


@triton.jit
def stripe_products(data, key):
    """The products of xxh3's lanes: low half times high half of the keyed data."""
    keyed = data ^ key
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit(do_not_specialize=["row_kibs"], do_not_specialize_on_alignment=["spans"])
def sum_kibs(memory, spans, keys, sums, row_kibs, KIBS: tl.constexpr):
    """Grid: (k, tiles of KIBS). spans: int64 [2, k], offsets and sizes; keys: see ``_keys``.

    sums: int64 [k, row_kibs, 16]: of each KiB but the last of a span the sums of products by lane, then the
    sums of data by the lane they are added to.
    """
    span = tl.program_id(0)
    full = (tl.load(spans + tl.num_programs(0) + span) - 1) // 1024
    kib = tl.program_id(1).to(tl.int64) * KIBS + tl.arange(0, KIBS)
    if tl.program_id(1).to(tl.int64) * KIBS >= full:
        return
    there = kib < full
    stripe, lane = tl.arange(0, 16), tl.arange(0, 8)
    words = (memory + tl.load(spans + span)).to(tl.pointer_type(tl.uint64))
    at = kib[:, None, None] * 128 + (stripe[:, None] * 8 + lane[None, :])[None, :, :]
    data = tl.load(words + at, mask=there[:, None, None], other=0)
    key = tl.load(keys.to(tl.pointer_type(tl.uint64)) + stripe[:, None] + lane[None, :])
    products = tl.sum(stripe_products(data, key[None, :, :]), 1)
    to = sums.to(tl.pointer_type(tl.uint64)) + (span.to(tl.int64) * row_kibs + kib[:, None]) * 16
    tl.store(to + lane[None, :], products, mask=there[:, None])
    tl.store(to + 8 + (lane ^ 1)[None, :], tl.sum(data, 1), mask=there[:, None])


@triton.jit(do_not_specialize=["row_kibs"], do_not_specialize_on_alignment=["spans"])
def chain_kibs(memory, spans, keys, sums, found, row_kibs, TURN: tl.constexpr):
    """Grid: (k,). Chain ``sums``, add the last KiB, and mix: found: int64 [k], the digests."""
    span = tl.program_id(0)
    size = tl.load(spans + tl.num_programs(0) + span)
    full = (size - 1) // 1024
    lane, stripe = tl.arange(0, 8), tl.arange(0, 16)
    keys = keys.to(tl.pointer_type(tl.uint64))
    row = sums.to(tl.pointer_type(tl.uint64)) + span.to(tl.int64) * row_kibs * 16 + lane
    lanes = tl.load(keys + 40 + lane)
    scramble = tl.load(keys + 16 + lane)
    for first in range(0, full, TURN):
        for i in tl.static_range(TURN):
            there = first + i < full
            kib = row + (first + i) * 16
            mixed = lanes + tl.load(kib, mask=there, other=0) + tl.load(kib + 8, mask=there, other=0)
            mixed = (mixed ^ (mixed >> 47) ^ scramble) * 0x9E3779B1
            lanes = tl.where(there, mixed, lanes)

    words = (memory + tl.load(spans + span)).to(tl.pointer_type(tl.uint64))
    rest = words + full * 128 + stripe[:, None] * 8
    whole = (stripe < (size - 1 - full * 1024) // 64)[:, None]
    data = tl.load(rest + lane[None, :], mask=whole, other=0)
    swapped = tl.load(rest + (lane ^ 1)[None, :], mask=whole, other=0)
    key = tl.load(keys + stripe[:, None] + lane[None, :])
    lanes += tl.sum(tl.where(whole, stripe_products(data, key), 0) + swapped, 0)
    last = words + (size - 64) // 8
    lanes += stripe_products(tl.load(last + lane), tl.load(keys + 24 + lane)) + tl.load(last + (lane ^ 1))

    one, other = tl.split(tl.reshape(lanes ^ tl.load(keys + 32 + lane), (4, 2)))
    folded = (one * other) ^ tl.umulhi(one, other)
    digest = tl.sum(folded, 0) + size.to(tl.uint64) * 0x9E3779B185EBCA87
    digest = (digest ^ (digest >> 37)) * 0x165667919E3779F9
    tl.store(found.to(tl.pointer_type(tl.uint64)) + span, digest ^ (digest >> 32))


@cache
def _keys(device: torch.device) -> Tensor:
    """Words of the secret (24: of stripe i the 8 from i on; the scramble's the last 8), then 8 of the last
    stripe, 8 of the merge, and the lanes' start: int64 [48]."""
    parts = [_SECRET, _SECRET[_LAST_KEY:][:64], _SECRET[_MERGE_KEY:][:64], np.array(_START, "<u8").tobytes()]
    words = np.frombuffer(b"".join(parts), "<i8")
    return torch.from_numpy(words.copy()).to(device)


def checksum_spans(memory: Tensor, offsets: Tensor, nbytes: Tensor) -> Tensor:
    """As ``reference.checksum_spans``."""
    count = len(nbytes)
    found = torch.empty(count, dtype=torch.int64, device=memory.device)
    if not count:
        return found
    whole_words = not ((offsets | nbytes) & 7).any() and memory.data_ptr() % 8 == 0
    if not whole_words or int(nbytes.min()) < _MIN_NBYTES:
        return reference.checksum_spans(memory, offsets, nbytes)
    row_kibs = (int(nbytes.max()) - 1) // 1024
    sums = torch.empty((count, row_kibs, 16), dtype=torch.int64, device=memory.device)
    spans, keys = torch.stack((offsets, nbytes)).to(memory.device), _keys(memory.device)
    if row_kibs:
        tiles = triton.cdiv(row_kibs, KIBS_PER_PROGRAM)
        sum_kibs[(count, tiles)](memory, spans, keys, sums, row_kibs, KIBS=KIBS_PER_PROGRAM, num_warps=4)
    chain_kibs[(count,)](memory, spans, keys, sums, found, row_kibs, TURN=KIBS_PER_TURN, num_warps=1)
    return found
