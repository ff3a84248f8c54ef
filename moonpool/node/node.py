"""A node that prefills, decodes, or does both, with one engine and one pool."""

from __future__ import annotations

from typing import Literal

from moonpool.decode_node.node import DecodeNode
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.node.node import Key
from moonpool.prefill_node.node import PrefillNode
from moonpool.protos import node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config

Role = Literal["prefill", "decode", "both"]


class ComputeNode(PrefillNode, DecodeNode):
    """Serves both stages of requests. Its role says which of them conductors place on it.

    Prompts and decoding sequences are in the same batches. A request that decodes where it was prefilled
    keeps its blocks: nothing is copied.
    """

    stages = ("prefill", "decode")

    def __init__(self, config: Config, role: Role) -> None:
        self.role = role
        super().__init__(config)

    def servicers(self) -> list[rpc.Servicer]:
        found = [*PrefillNode.servicers(self), (node_pb2_grpc.add_DecodeNodeServicer_to_server, self)]
        self.engine.on_step = self.on_step
        return found

    def on_step(self, events: list[StepEvent]) -> None:
        """Report a step's events to the service of each sequence: those of both may have the same key."""
        prefills = [event for event in events if event.sequence.prefill_only]
        if not prefills:
            self.on_decodes(events)
            return
        self.on_prefills(prefills)
        if len(prefills) < len(events):
            self.on_decodes([event for event in events if not event.sequence.prefill_only], mixed=True)

    def num_requests(self) -> int:
        return PrefillNode.num_requests(self) + DecodeNode.num_requests(self)

    def num_in_stage(self, stage: str) -> int:
        return (PrefillNode if stage == "prefill" else DecodeNode).num_requests(self)

    async def stop(self) -> None:
        await PrefillNode.stop(self)
        await DecodeNode.stop(self)

    def cancel(self, key: Key) -> None:
        PrefillNode.cancel(self, key)
        DecodeNode.cancel(self, key)
