"""The shape of one KV block, and the fingerprint that distinguishes shapes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Protocol

from moonpool.kvstore.errors import LayoutError

#: Bytes of one element, by the dtype's name.
DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}

# What a token has in each head beside its elements: int8 codes have a float32 scale.
_SCALE_NBYTES = {"int8": 4}

# Part of every fingerprint: raise it when the order of bytes inside a block changes.
FORMAT_VERSION = 1


class BlockFormat(Protocol):
    """What a tier needs to know of its blocks."""

    @property
    def block_nbytes(self) -> int: ...

    @property
    def fingerprint(self) -> bytes:
        """16 bytes."""
        ...


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block is ``[num_layers, components, num_kv_heads, block_size, head_dim]`` of ``dtype``, contiguous.

    Heads come before tokens, so that a tensor-parallel shard is one run per layer; layers come first, so that
    a pipeline stage is one run. ``num_layers`` and ``num_kv_heads`` are those of one rank. With int8 the last
    dimension is head_dim + 4: a head's bytes are the codes of all its tokens, then a float32 scale of each,
    so scales go wherever the head goes.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    # What each head of a layer has; ("latent",): one vector for both.
    components: tuple[str, ...] = ("k", "v")
    variant: str = ""  # what else the values depend on, of settings that keys do not contain

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "block_size", "head_dim"):
            if getattr(self, name) <= 0:
                raise LayoutError(f"layout.{name} must be positive, got {getattr(self, name)}")
        if self.dtype not in DTYPE_NBYTES:
            raise LayoutError(f"layout.dtype must be one of {', '.join(DTYPE_NBYTES)}, got {self.dtype!r}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``[num_layers, components, num_kv_heads, block_size, head_dim]``; of int8 head_dim + 4."""
        row = self.head_dim + _SCALE_NBYTES.get(self.dtype, 0)
        return (self.num_layers, self.num_components, self.num_kv_heads, self.block_size, row)

    @property
    def num_components(self) -> int:
        return len(self.components)

    @property
    def block_nbytes(self) -> int:
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]

    @property
    def head_nbytes(self) -> int:
        """One component of one head of one layer, which no rank splits."""
        return self.block_size * self.shape[-1] * DTYPE_NBYTES[self.dtype]

    def __str__(self) -> str:
        kind = "KV heads" if self.components == ("k", "v") else "+".join(self.components)
        return (
            f"{self.num_layers} layers × {self.num_kv_heads} {kind} × {self.head_dim}, "
            f"{self.block_size} tokens a block, {self.dtype}{self.variant and f', {self.variant}'}"
        )

    @property
    def fingerprint(self) -> bytes:
        """16 bytes; nodes exchange blocks only when theirs are equal."""
        text = f"{FORMAT_VERSION}:{','.join(map(str, self.shape))}:{self.dtype}"
        text += f":{self.variant}" if self.variant else ""
        return blake2b(text.encode(), digest_size=16, person=b"moonpool-layout").digest()


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """Blocks of unknown content: of another node's model, or of no model."""

    block_nbytes: int
    fingerprint: bytes  # 16 bytes

    def __post_init__(self) -> None:
        if self.block_nbytes <= 0 or len(self.fingerprint) != 16:
            raise LayoutError(
                f"a layout of {self.block_nbytes} bytes a block and a fingerprint of "
                f"{len(self.fingerprint)} bytes is impossible"
            )
