"""``moonpool up --engine vllm``: a cluster of vLLM engines on this machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from moonpool.client import Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import load_config
from tests.processes import are_gone, descendants_of

SETS = ["cluster.engine=vllm", "cluster.prefill=0", "cluster.decode=0", "cluster.both=1"]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_cluster_of_engines(vllm_python: Path, tmp_path: Path) -> None:
    config = load_config(None, [*SETS, "conductor.port=0", "model.max_model_len=1024"])
    async with LocalCluster(config, directory=tmp_path) as cluster:
        [engine] = cluster.nodes
        processes = [psutil.Process(engine.pid), *descendants_of(engine.pid)]
        assert len(processes) > 1
        async with cluster.client() as client:
            reply = Reply()
            asked = [{"role": "user", "content": "Who was Moses?"}]
            text = "".join([piece async for piece in client.chat(asked, reply, max_tokens=8, temperature=0)])
            assert text and reply.finish_reason in ("stop", "length")
            [node] = (await client.cluster())["nodes"]
            assert node["engine"].startswith("vllm at ")
    assert are_gone(processes)
