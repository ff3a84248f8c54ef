"""Block keys of vLLM engines, computed without vLLM."""

from __future__ import annotations

import numpy as np

from moonpool.kvstore.blocks.vllm_keys import VllmChain, key_of

# By vLLM 0.32's sha256, of its default seed "vllm-none-hash" and of the tokens below.
NONE_HASH = bytes.fromhex("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198")
HASHES = (
    bytes.fromhex("ca890e0d21e3e6dd76c5bfed886c5b1db485b65e5b663e3cf19f32890a65582f"),
    bytes.fromhex("3540ebb02c4fb47d608ed62912729749603198cf537634d94848c1814804e975"),
)
SALTED = bytes.fromhex("2b383e35b4f02798704ef4bffbe8cc7e6682d7e7ee8dc73d8389d2c475a7627d")
TOKENS = np.array([i * 7919 % 151_000 for i in range(40)], np.int32)
FINGERPRINT = b"sixteen bytes..."


def test_keys_are_those_of_vllms_hashes() -> None:
    keys, state = VllmChain(FINGERPRINT, NONE_HASH).extend(TOKENS, 16, None)
    assert keys == [key_of(FINGERPRINT, block_hash) for block_hash in HASHES]
    assert state == HASHES[-1]
    [salted], _ = VllmChain(FINGERPRINT, NONE_HASH, "s3").extend(TOKENS[:16], 16, None)
    assert salted == key_of(FINGERPRINT, SALTED)


def test_a_chain_goes_on_where_it_was() -> None:
    for salt in ("", "s3"):
        chain = VllmChain(FINGERPRINT, NONE_HASH, salt)
        whole, end = chain.extend(TOKENS, 16, None)
        first, state = chain.extend(TOKENS[:16], 16, None)
        assert (first + (rest := chain.extend(TOKENS[16:], 16, state))[0], rest[1]) == (whole, end)
        assert chain.extend(TOKENS[32:], 16, end) == ([], end)


def test_roots_differ_where_keys_do() -> None:
    roots = {
        VllmChain(fingerprint, none_hash, salt).root
        for fingerprint in (FINGERPRINT, FINGERPRINT[::-1])
        for none_hash in (NONE_HASH, NONE_HASH[::-1])
        for salt in ("", "s3")
    }
    assert len(roots) == 8
