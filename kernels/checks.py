"""Checks of kernel arguments: shapes, dtypes, contiguity, and every index that reaches memory.

``MOONPOOL_KERNELS=checked`` runs them before each operation. They cost many times the operation itself and
serve tests and the search for a wrong caller. Fast forms check nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from moonpool.kernels import reference
from moonpool.kernels.reference import FP8, head_dim_of
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass

Form = TypeVar("Form", bound=Callable[..., Any])
Arguments = Mapping[str, Any]

# Operation -> name, dtype (default: that of the first tensor) and shape of each tensor. A dimension named
# twice must be equal. All but "strided" tensors must be contiguous.
_SIGNATURES = {
    "add_lora": """y: strided [n, out]; x: [n, in]; weights: [values]; adapter_ids: int32 [n];
        extents: int32 [adapters, 2]; lines: int32 [rows, 2]""",
    "argmax_rows": "logits: strided [n, vocab]",
    "checksum_spans": "memory: [n]; offsets: int64 [k]; nbytes: int64 [k]",
    "combine_experts": "weights: float32 [n, k]; order: int64 [n * k]; rows: strided [n * k, hidden]",
    "forbid_tokens": "scores: [n, vocab]; masks: int32 [n, words]",
    "group_by_expert": "expert_ids: int32 [n, k]",
    "group_rows": "x: strided [n, width]; order: int64 [n * k]",
    "grouped_matmul": "weights: strided [experts, out, in]; x: [m, in]; offsets: int32 [experts + 1]",
    "merge_attention_states": """outs: [parts, n, num_heads, head_dim];
        lses: float32 [parts, n, num_heads]""",
    "paged_decode_attention": """q: [batch, q_len, num_heads, head_dim]; context_lens: int32 [batch];
        q_positions: int32 [batch]; out: [batch, q_len, num_heads, head_dim];
        lse: float32 [batch, q_len, num_heads]""",
    "paged_prefill_attention": """q: [num_tokens, num_heads, head_dim]; cu_seqlens_q: int32 [batch + 1];
        context_lens: int32 [batch]; q_positions: int32 [batch]; out: [num_tokens, num_heads, head_dim];
        lse: float32 [num_tokens, num_heads]""",
    "quantised_matmul": """x: strided [n, in]; codes: uint8 [out, row]; scales: float32 [out, groups];
        zeros: int16 [out, groups]""",
    "rms_norm": "x: [n, hidden]; weight: [hidden]; residual: [n, hidden]",
    "rotate_and_write": """qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim]; positions: int64 [n];
        cos: float32 [max_position, angles]; sin: float32 [max_position, angles];
        slot_mapping: int64 [n]; q_norm: [head_dim]; k_norm: [head_dim]""",
    "route_experts": "logits: strided [n, num_experts]",
    "silu_mul": "gate_up: [n, 2 * inter]",
    "write_kv": """k: [n, num_kv_heads, head_dim]; v: [n, num_kv_heads, head_dim];
        slot_mapping: int64 [n]""",
}
_TENSORS = {
    operation: [
        (name.strip(), spec.strip()) for name, _, spec in (part.partition(":") for part in text.split(";"))
    ]
    for operation, text in _SIGNATURES.items()
}


class KernelMisuse(MoonpoolError):
    """A kernel was called with invalid arguments. Nothing has been read or written."""

    failure = FailureClass.WORKER


def checked(form: Form) -> Form:
    """``form``, preceded by the checks of its operation; they raise KernelMisuse."""
    operation = form.__name__
    signature = inspect.signature(getattr(reference, operation))

    @functools.wraps(form)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        _check(operation, bound.arguments)
        return form(*args, **kwargs)

    return cast(Form, call)


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise KernelMisuse(sentence)


def _check(operation: str, a: Arguments) -> None:
    if "pool" in a:
        _check_pool(**{name: a[name] for name in ("pool", "layer", "k_scale", "v_scale")}, first=_first(a))
    _check_tensors(operation, a)
    if "slot_mapping" in a:
        _check_slots(a["slot_mapping"], a["pool"])
    if operation in _MORE:
        _MORE[operation](a)


def _first(a: Arguments) -> tuple[str, Tensor]:
    return next((name, value) for name, value in a.items() if isinstance(value, Tensor))


def _check_tensors(operation: str, a: Arguments) -> None:
    sizes = _known_sizes(a)
    for name, spec in _TENSORS[operation]:
        x: Tensor | None = a[name]
        if x is None:
            continue
        if operation == "paged_decode_attention" and a["q"].dim() == 3:
            spec = spec.replace("q_len, ", "")
        kind, _, shape = spec.removesuffix("]").partition("[")
        strided = kind.startswith("strided")
        dtype = getattr(torch, kind.strip()) if kind and not strided else _first(a)[1].dtype
        # Norms that add 1 to their weights have them in float32.
        wide = name in ("weight", "q_norm", "k_norm") and x.dtype == torch.float32
        _require(wide or x.dtype == dtype, f"{name} must be {dtype}, is {x.dtype}")
        symbols = shape.split(", ")
        fits = x.dim() == len(symbols) and all(
            sizes.setdefault(symbol, size) == size for symbol, size in zip(symbols, x.shape, strict=True)
        )
        known = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in symbols if symbol in sizes)
        _require(fits, f"{name} must have the shape [{shape}] with {known}; it has {list(x.shape)}")
        _require(strided or x.is_contiguous(), f"{name} must be contiguous, has strides {x.stride()}")


def _known_sizes(a: Arguments) -> dict[str, int]:
    """The dimensions that follow from other arguments than the shape of the tensor that is checked."""
    sizes = {name: value for name, value in a.items() if type(value) is int}
    if "pool" in a:
        given = {name: sizes[name] for name in ("num_kv_heads", "head_dim") if name in sizes}
        sizes |= {"num_kv_heads": a["pool"].shape[3], "head_dim": head_dim_of(a["pool"])}
        _require(given.items() <= sizes.items(), f"heads {given} differ from those of the pool")
    if "qkv" in a:
        width = (sizes["num_heads"] + 2 * sizes["num_kv_heads"]) * sizes["head_dim"]
        sizes["(num_heads + 2 * num_kv_heads) * head_dim"] = width
    if "block_table" in a:
        sizes |= {"batch": a["block_table"].shape[0], "batch + 1": a["block_table"].shape[0] + 1}
    if "weights" in a and "offsets" in a:
        sizes["experts + 1"] = a["weights"].shape[0] + 1
    elif "order" in a:
        sizes["n * k"] = a["x"].shape[0] * a["k"] if "x" in a else a["weights"].numel()
    if "gate_up" in a:
        sizes["2 * inter"] = a["gate_up"].shape[-1] // 2 * 2
    return sizes


def _check_pool(pool: Tensor, layer: int, k_scale: float, v_scale: float, first: tuple[str, Tensor]) -> None:
    _require(pool.dim() == 6 and pool.shape[2] == 2, f"a pool has six dimensions, got {list(pool.shape)}")
    contiguous = pool.stride(5) == 1 and pool.stride(4) == pool.shape[5]
    _require(contiguous, f"the pool's last two dimensions must be contiguous, got strides {pool.stride()}")
    _require(0 <= layer < pool.shape[1], f"layer {layer} is not one of the pool's {pool.shape[1]}")
    name, x = first
    if pool.dtype in (FP8, torch.int8):
        _require(x.dtype in (torch.float32, torch.bfloat16, torch.float16), f"{name} is {x.dtype}")
    if pool.dtype == FP8:
        _require(k_scale > 0 and v_scale > 0, f"scales must be positive, are {k_scale} and {v_scale}")
    else:
        same = pool.dtype in (x.dtype, torch.int8)
        _require(same, f"{name} must be {pool.dtype} as the pool, is {x.dtype}")
        _require(k_scale == v_scale == 1.0, f"a pool of {pool.dtype} has no scales")


def _check_slots(slot_mapping: Tensor, pool: Tensor) -> None:
    num_slots = pool.shape[0] * pool.shape[4]
    _require(bool((slot_mapping < num_slots).all()), f"a slot lies beyond the pool's {num_slots}")
    used = [slot for slot in slot_mapping.tolist() if slot >= 0]
    _require(len(set(used)) == len(used), "two tokens share a slot")


def _check_positions(a: Arguments) -> None:
    cos, head_dim = a["cos"], a["head_dim"]
    _require(2 * cos.shape[1] <= head_dim, f"rotary tables of {cos.shape[1]} angles for heads of {head_dim}")
    _require(_in_range(a["positions"], 0, cos.shape[0]), f"a position is beyond the {cos.shape[0]} of cos")


def _check_decode(a: Arguments) -> None:
    q = a["q"]
    count = 1 if q.dim() == 3 else q.shape[1]
    _require(1 <= count <= 16, f"q must have 1 to 16 tokens a sequence, has {count}")
    _check_attention(a, [count] * q.shape[0])


def _check_prefill(a: Arguments) -> None:
    starts, num_tokens = a["cu_seqlens_q"].tolist(), a["q"].shape[0]
    _require(starts[0] == 0 and starts[-1] == num_tokens, f"cu_seqlens_q {starts} for {num_tokens} queries")
    counts = [end - start for start, end in pairwise(starts)]
    for i, (new, length) in enumerate(zip(counts, a["context_lens"].tolist(), strict=True)):
        fits = a["q_positions"] is not None or new <= length
        _require(new >= 0 and fits, f"sequence {i} has {new} new tokens of {length}")
    most = a["max_q_len"]
    _require(not most or max(counts, default=0) <= most, f"max_q_len {most} of {counts} new tokens")
    _check_attention(a, counts)


def _check_attention(a: Arguments, counts: list[int]) -> None:
    """Check that every visible key is in the pool. counts: queries of each sequence."""
    pool, table, window, q_positions = a["pool"], a["block_table"], a["window"], a["q_positions"]
    num_heads, num_kv_heads = a["q"].shape[-2], pool.shape[3]
    _require(num_heads % num_kv_heads == 0, f"{num_heads} heads are no multiple of {num_kv_heads} kv heads")
    _require(table.dtype == torch.int32, f"block_table must be torch.int32, is {table.dtype}")
    _require(table.stride(1) == 1, "a row of block_table must be contiguous")
    num_blocks, block_size = pool.shape[0], pool.shape[4]
    for i, (count, length) in enumerate(zip(counts, a["context_lens"].tolist(), strict=True)):
        position = length - count if q_positions is None else int(q_positions[i])
        first = min(length, max(0, position - window + 1)) if window else 0
        needed = -(-length // block_size)
        _require(needed <= table.shape[1], f"sequence {i} of {length} tokens has too few blocks in its table")
        row = table[i, first // block_size : needed]
        _require(
            _in_range(row, 0, num_blocks), f"sequence {i} has a block outside of the pool: {row.tolist()}"
        )


def _check_routing(a: Arguments) -> None:
    k, num_experts = a["k"], a["logits"].shape[1]
    _require(0 < k <= num_experts, f"cannot choose {k} of {num_experts} experts")


def _check_expert_ids(a: Arguments) -> None:
    last = a["num_experts"] - 1
    _require(_in_range(a["expert_ids"], 0, last + 1), f"an expert id is outside of 0 … {last}")


def _check_order(a: Arguments) -> None:
    order = a["order"].tolist()
    _require(sorted(order) == list(range(len(order))), "order must contain each choice once")


def _check_offsets(a: Arguments) -> None:
    offsets, num_rows = a["offsets"].tolist(), a["x"].shape[0]
    valid = offsets[0] == 0 and sorted(offsets) == offsets and offsets[-1] <= num_rows
    _require(valid, f"offsets must rise from 0 to at most {num_rows}, are {offsets}")


def _check_masks(a: Arguments) -> None:
    found, vocab = a["masks"].shape[1], a["scores"].shape[1]
    _require(found == -(-vocab // 32), f"{vocab} tokens need masks of {-(-vocab // 32)} words, got {found}")


def _check_adapter_ids(a: Arguments) -> None:
    extents, lines = a["extents"], a["lines"]
    last, num_rows = len(extents) - 1, len(lines)
    _require(_in_range(a["adapter_ids"], -1, last + 1), f"an adapter id is outside of -1 … {last}")
    inside = extents.shape[1] == 2 and _in_range(extents, 0, num_rows + 1)
    _require(inside and _in_range(extents.sum(1), 0, num_rows + 1), f"an adapter is beyond {num_rows} rows")
    _require(_in_range(extents[:, 1], 0, a["max_rank"] + 1), f"a rank is outside of 0 … {a['max_rank']}")
    values_a_line = reference.LINE_NBYTES // a["weights"].itemsize
    for begins, width in zip(lines.long().unbind(1), (a["x"].shape[1], a["y"].shape[1]), strict=True):
        ends = len(a["weights"]) - width
        _require(_in_range(begins * values_a_line, 0, ends + 1), "a row of an adapter is beyond its memory")
    _require(a["y"].stride(1) == 1, "a row of y must be contiguous")


def _in_range(values: Tensor, least: int, end: int) -> bool:
    return bool(((values >= least) & (values < end)).all())


def _check_codes(a: Arguments) -> None:
    ins, kind, groups = a["x"].shape[1], a["kind"], -(-a["x"].shape[1] // a["group"])
    row = -(-ins // 32) * 16 if kind == "int4" else ins
    found = a["codes"].shape[1], a["scales"].shape[1]
    _require(
        found == (row, groups),
        f"{ins} inputs of {kind} in groups of {a['group']} need {row} bytes and {groups} scales an output, "
        f"there are {found[0]} and {found[1]}",
    )


_MORE: dict[str, Callable[[Arguments], None]] = {
    "add_lora": _check_adapter_ids,
    "combine_experts": _check_order,
    "forbid_tokens": _check_masks,
    "group_by_expert": _check_expert_ids,
    "group_rows": _check_order,
    "grouped_matmul": _check_offsets,
    "paged_decode_attention": _check_decode,
    "paged_prefill_attention": _check_prefill,
    "quantised_matmul": _check_codes,
    "rotate_and_write": _check_positions,
    "route_experts": _check_routing,
}
