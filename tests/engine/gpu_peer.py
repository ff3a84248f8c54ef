"""A prefill node's engine as a process of its own: computes a prompt, and lends its blocks until stdin ends.

    python tests/engine/gpu_peer.py CHECKPOINT DEVICE SHARE TOKEN,TOKEN,…

Prints one line of JSON when the blocks are there: the agent's descriptor, where the blocks are, their
checksums, the token that follows.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.device.selection import choose_device
from moonpool.engine.engine import Engine
from moonpool.engine.memory.block_bytes import DeviceBytes
from moonpool.runtime.config.options import EngineOptions, ModelOptions, TransferOptions
from moonpool.transfer import TransferAgent


async def main(checkpoint: str, device_name: str, share: str, prompt: str) -> None:
    device = choose_device(device_name)
    options = EngineOptions(block_size=8, gpu_memory=float(share), max_batch_size=4)
    engine = Engine(checkpoint, options, ModelOptions(dtype="float32"), device=device)
    tokens = np.array([int(token) for token in prompt.split(",")], np.int32)
    sequence = Sequence(
        "prompt", 0, tokens, len(tokens), sampling=Sampling(max_tokens=20), root_key=b"r" * 16
    )
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_step(events: list[StepEvent]) -> None:
        for event in events:
            if event.token_id >= 0:
                first.set_result(event.token_id)

    engine.on_step = on_step
    await engine.start()
    async with await TransferAgent.start(TransferOptions(), agent_id="prefill", epoch=1) as agent:
        region = agent.register(engine.pool_tensor, name="pool")
        engine.add(sequence, prefill_only=True)
        token = await first
        nbytes = engine.layout.block_nbytes
        news = {
            "agent": agent.describe().pack().hex(),
            "spans": [[region.id, block * nbytes, nbytes] for block in sequence.block_table],
            "checksums": DeviceBytes(engine.pool_tensor, device).checksums(sequence.block_table),
            "token": token,
            "num_blocks": engine.pool.num_blocks,
        }
        print(json.dumps(news), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        engine.release(sequence)
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
