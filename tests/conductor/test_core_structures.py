"""Structured requests in the core: only nodes that can enforce a structure get them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moonpool.conductor.engines.completion import body_of
from moonpool.conductor.errors import NoStructures, RequestInvalid
from moonpool.conductor.request import GenerateRequest
from moonpool.protos import node_pb2
from moonpool.runtime.structure.grammars import Structure
from tests.conductor.core_nodes import (
    PROMPT,
    Cluster,
    ScriptedNode,
    continuation,
    request,
    running,
)
from tests.conductor.faults import dies, once


async def enforces(cluster: Cluster, *names: str) -> None:
    """These nodes say that they have the library."""
    for name in names:
        node = cluster.nodes[name]
        node.record = replace(node.record, extra={**node.record.extra, "structured": True})
        await node.announce()
    members = cluster.conductor._deps.registry.members
    while not all(members[name].structures for name in names):
        await cluster.conductor._deps.registry.change(0.01)


def structured(name: str = "r") -> GenerateRequest:
    plain = request(name)
    return replace(plain, sampling=replace(plain.sampling, structure=Structure("regex", "[a-z]+")))


async def test_they_go_to_the_nodes_that_can(url: str) -> None:
    async with running(url, "p0", "p1", "d0", "d1", namespace="elsewhere") as cluster:
        await enforces(cluster, "p1", "d0")
        for number in range(6):
            assert await cluster.generate(structured(f"s{number}")) == continuation(PROMPT, 8)
        assert cluster.nodes["p0"].works == cluster.nodes["d1"].works == []
        for name in ("p1", "d0"):
            sent = {work.sampling.structure.kind for work in cluster.nodes[name].works}
            assert sent == {"regex"}
        # Others go anywhere, here to the nodes that are left.
        for name in ("p1", "d0"):
            cluster.nodes[name].state = "draining"
            await cluster.nodes[name].announce()
            await cluster.until(lambda name=name: cluster.state(name) == "draining")
        await cluster.generate(request("plain"))
        assert cluster.nodes["p0"].works
        assert cluster.nodes["d1"].works


@pytest.mark.parametrize("able", [(), ("p0",), ("d0",)], ids=str)
async def test_without_such_nodes_they_are_refused_at_once(url: str, able: tuple[str, ...]) -> None:
    async with running(url, "p0", "d0", namespace=f"refused-{'-'.join(able)}") as cluster:
        await enforces(cluster, *able)
        with pytest.raises(NoStructures, match=r"moonpool\[serve\]"):
            await cluster.generate(structured())
        assert cluster.nodes["p0"].works == cluster.nodes["d0"].works == []


async def test_a_retry_has_the_structure_and_the_tokens_so_far(url: str) -> None:
    async with running(url, "p0", "d0", "d1", "d2", namespace="retry") as cluster:
        await enforces(cluster, "p0", "d0", "d1")
        script = once(3, dies)
        for name in ("d0", "d1"):
            cluster.nodes[name].script = script
        assert await cluster.generate(structured()) == continuation(PROMPT, 8)
        work = cluster.nodes["p0"].works[-1]
        assert len(work.token_ids) // 4 > len(PROMPT)
        assert work.sampling.structure.text == "[a-z]+"
        assert cluster.nodes["d2"].works == []


async def test_a_structure_that_cannot_go_on_is_not_tried_again(url: str) -> None:
    async def fails(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if index == 3:
            conductor_id = cluster.conductor._deps.conductor_id
            ended = node_pb2.TokenOut(
                request_id=work.request_id,
                attempt=work.attempt,
                finish_reason=node_pb2.FINISH_ERROR,
                error="no token can come next",
                invalid=True,
            )
            node.tell(conductor_id, ended)

    async with running(url, "p0", "d0", "d1", namespace="invalid") as cluster:
        await enforces(cluster, "p0", "d0", "d1")
        for name in ("d0", "d1"):
            cluster.nodes[name].script = fails
        with pytest.raises(RequestInvalid, match="no token can come next"):
            await cluster.generate(structured())
        assert len(cluster.nodes["p0"].works) == 1


VLLM: dict[str, tuple[Structure, dict[str, Any]]] = {
    "json": (Structure("json", '{"type":"object"}'), {"json": {"type": "object"}}),
    "object": (Structure("json_object"), {"json_object": True}),
    "regex": (Structure("regex", "a+"), {"regex": "a+"}),
    "choice": (Structure("choice", '["a","b"]'), {"choice": ["a", "b"]}),
    "grammar": (Structure("grammar", 'start: "a"'), {"grammar": 'start: "a"'}),
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm_gets_it_in_its_own_form(name: str) -> None:
    structure, expected = VLLM[name]
    plain = request().sampling
    work = node_pb2.Work(
        request_id="r",
        token_ids=b"\1\0\0\0",
        num_prompt_tokens=1,
        sampling=replace(plain, structure=structure).to_proto(1),
    )
    body = body_of(work, model="m", max_model_len=100, salt="")
    assert body["structured_outputs"] == expected
    work.sampling.CopyFrom(plain.to_proto(1))
    assert "structured_outputs" not in body_of(work, model="m", max_model_len=100, salt="")
