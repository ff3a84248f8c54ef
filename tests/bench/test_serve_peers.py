"""The peers: a real child process generating, and what happens when one cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.bench.harness.peers import PeerFailed
from moonpool.bench.serve.peers.contestants import transformers_peer
from moonpool.runtime.config.options import ModelOptions

pytestmark = pytest.mark.slow  # each starts a Python with transformers


async def test_transformers_generates_in_a_process_of_its_own() -> None:
    pytest.importorskip("transformers")
    async with transformers_peer(ModelOptions().directory, "float32") as peer:
        assert peer.name == "transformers float32"
        assert await peer.together([[5, 6, 7], [8, 9, 10]], 4) > 0
        assert await peer.alone([5, 6, 7], 4) < 10


async def test_a_peer_that_cannot_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"transformers float32: .*Unrecognized model"):
        async with transformers_peer(tmp_path, "float32"):
            pass
