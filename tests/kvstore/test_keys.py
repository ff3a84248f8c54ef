"""Laws of block keys and layouts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.blocks.keys import KEY_NBYTES, chain, extend, pack, root_key, tenant_secret, unpack
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.errors import KeyFormatError, LayoutError

LAYOUT = KVLayout(num_layers=6, num_kv_heads=4, block_size=16, head_dim=32, dtype="bfloat16")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70).map(lambda ids: np.array(ids, dtype=np.int32))


def test_a_block_is_layers_by_kv_by_heads_by_tokens_by_dims() -> None:
    assert LAYOUT.shape == (6, 2, 4, 16, 32)
    assert LAYOUT.block_nbytes == 6 * 2 * 4 * 16 * 32 * 2


def test_every_field_of_a_layout_changes_its_fingerprint() -> None:
    others = [
        replace(LAYOUT, num_layers=4),
        replace(LAYOUT, num_kv_heads=6),
        replace(LAYOUT, components=("latent",), head_dim=64),
        replace(LAYOUT, variant="long rotary factors"),
        replace(LAYOUT, block_size=32),
        replace(LAYOUT, head_dim=16),
        replace(LAYOUT, dtype="float16"),
    ]
    assert len({LAYOUT.fingerprint, *(other.fingerprint for other in others)}) == 8
    assert len(LAYOUT.fingerprint) == 16


@pytest.mark.parametrize(("field", "value"), [("num_layers", 0), ("head_dim", -1), ("dtype", "int7")])
def test_an_impossible_layout_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(LayoutError, match=field):
        replace(LAYOUT, **{field: value})


def test_roots_differ_by_everything_that_changes_kv_bytes_or_owner() -> None:
    roots = [
        root_key(model=b"m", layout=LAYOUT),
        root_key(model=b"n", layout=LAYOUT),
        root_key(model=b"m", layout=replace(LAYOUT, dtype="float16")),
        root_key(model=b"m", layout=replace(LAYOUT, block_size=32)),
        root_key(model=b"m", layout=LAYOUT, adapter="a"),
        root_key(model=b"m", layout=LAYOUT, tenant=b"a"),
        root_key(model=b"m", layout=LAYOUT, adapter="a", tenant=b"a"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_tenants_secret_needs_the_clusters() -> None:
    secrets = [tenant_secret(key * 32, name) for key in (b"1", b"2") for name in ("a", "b")]
    assert len(set(secrets)) == 4
    assert tenant_secret(b"1" * 32, "a") == secrets[0]
    assert tenant_secret(b"1" * 32, "") == b"", "no tenant: engines without a key share these blocks"


def test_a_root_does_not_depend_on_how_heads_and_layers_are_spread_over_ranks() -> None:
    shard = replace(LAYOUT, num_kv_heads=2, num_layers=3)
    assert root_key(model=b"m", layout=shard) == root_key(model=b"m", layout=LAYOUT)


@given(TOKENS, st.sampled_from([1, 8, 16]))
def test_a_chain_is_its_blocks_extended_one_by_one(token_ids: np.ndarray, block_size: int) -> None:
    root = root_key(model=b"m", layout=LAYOUT)
    keys = chain(root, token_ids, block_size)
    assert len(keys) == len(token_ids) // block_size
    key = root
    for index, expected in enumerate(keys):
        key = extend(key, token_ids[index * block_size : (index + 1) * block_size].tobytes())
        assert key == expected
        assert len(key) == KEY_NBYTES
    assert unpack(pack(keys)) == keys


@given(TOKENS, st.integers(0, 8))
def test_a_chain_continued_from_any_block_is_the_same_chain(token_ids: np.ndarray, cut: int) -> None:
    root = root_key(model=b"m", layout=LAYOUT)
    whole = chain(root, token_ids, 8)
    cut = min(cut, len(whole))
    head = chain(root, token_ids[: cut * 8], 8)
    tail = chain(root, token_ids[cut * 8 :], 8, start=head[-1] if head else None)
    assert head + tail == whole


def test_one_changed_token_changes_every_key_after_it() -> None:
    token_ids = np.arange(64, dtype=np.int32)
    other = token_ids.copy()
    other[20] += 1
    same = [a == b for a, b in zip(chain(b"r" * 16, token_ids, 16), chain(b"r" * 16, other, 16), strict=True)]
    assert same == [True, False, False, False]


def test_keys_are_equal_in_another_process() -> None:
    code = (
        "import numpy as np; from moonpool.kvstore.blocks.keys import chain; "
        "print(chain(b'r' * 16, np.arange(32, dtype=np.int32), 16)[-1].hex())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == chain(b"r" * 16, np.arange(32, dtype=np.int32), 16)[-1].hex()


def test_packed_keys_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(KeyFormatError, match="17"):
        unpack(b"x" * 17)
