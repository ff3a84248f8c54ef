"""The doctor's checks of roles, on the state that a conductor reports."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.nodes import check_nodes


def node(name: str, role: str, state: str = "ready") -> dict[str, Any]:
    return {"node_id": name, "role": role, "state": state, "host": "here", "reasons": ["its disk fails"]}


def states(*nodes: dict[str, Any]) -> dict[str, str]:
    return {finding.what: finding.state for finding in check_nodes(Evidence({"nodes": list(nodes)}))}


def test_a_node_of_both_roles_serves_either_stage() -> None:
    assert states(node("both-0", "both")) == {"both-0": "ok"}
    assert states(node("both-0", "both"), node("decode-0", "decode")) == {"both-0": "ok", "decode-0": "ok"}


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([], {"prefill nodes", "decode nodes"}),
        ([node("prefill-0", "prefill"), node("store-0", "store")], {"decode nodes"}),
        ([node("both-0", "both", "draining")], {"prefill nodes", "decode nodes"}),
    ],
)
def test_a_stage_that_no_node_serves_is_missing(nodes: list[dict[str, Any]], missing: set[str]) -> None:
    found = states(*nodes)
    assert {name for name, state in found.items() if state == "missing"} == missing


def test_a_stage_with_unhealthy_nodes_alone_is_reported() -> None:
    found = states(node("both-0", "both", "unhealthy"), node("prefill-0", "prefill"))
    assert found["decode nodes"] == "wrong"
    assert "prefill nodes" not in found


def test_less_free_memory_of_a_gpu_than_the_pool_believes_is_said() -> None:
    gpu = {"gpu": "3", "memory_free_nbytes": 2 << 30, "memory_taken_nbytes": 5 << 30}
    decode = node("decode-0", "decode") | {"health": {"gpus": [gpu]}}
    found = {one.what: one.fact for one in check_nodes(Evidence({"nodes": [decode]}))}
    assert found["decode-0"].endswith("ready; GPU 3: 2.0 GiB free, 5.0 GiB less than its pool believes")
