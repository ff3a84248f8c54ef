"""One engine driven by equal requests, and the time of its steps."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from moonpool.bench.engine.model_shapes import randomize
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.model.latent import LatentInput, LatentOutput
from moonpool.engine.model.weight_loader import Mlp
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.structure.automaton import Automaton

_WARM_UP_STEPS = 8


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Medians. ``step_s``: from one step's tokens to the next one's; ``device_s``: of it, from the launch to
    the tokens' arrival in main memory."""

    step_s: float
    device_s: float
    context: float  # tokens of each sequence, in the middle of what was measured


class Session:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # When, how many tokens, device seconds.
        self._arrivals: list[tuple[float, int, float]] = []
        self._news = asyncio.Event()
        self._random = np.random.default_rng(0)
        self._count = 0
        engine.on_step = self._on_step

    def _on_step(self, events: list[StepEvent]) -> None:
        num_tokens = sum(event.token_id >= 0 for event in events)
        self._arrivals.append((time.perf_counter(), num_tokens, self.engine.stats().step_s))
        self._news.set()

    def weight_nbytes(self) -> int:
        """Of the matrices of a dense model; 0: of a mixture, of which a step reads only some."""
        assert self.engine._loop is not None
        model = self.engine._loop.runner.model
        nbytes = model.head.nbytes
        for layer in model.layers:
            if isinstance(layer.qkv, LatentInput) or isinstance(layer.o, LatentOutput):
                return 0
            if not isinstance(layer.mlp, Mlp):
                return 0
            linears = (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)
            nbytes += sum(linear.nbytes for linear in linears)
        return nbytes

    async def first_token_s(self, num_tokens: int) -> float:
        """Seconds from a new prompt to its first token."""
        sequence = self._drawn(num_tokens, 1)
        begun_s = time.perf_counter()
        await self._run([sequence])
        return self._arrivals[-1][0] - begun_s

    async def decode(
        self,
        batch: int,
        context: int,
        num_steps: int,
        sampling: Sampling | None = None,
        automata: Iterable[Automaton] = (),
    ) -> DecodeSteps:
        """Steps of ``batch`` sequences, each of ``context`` tokens and growing; a pipeline divides them into
        its micro-batches, and its ``step_s`` is the time between two tokens of a sequence. ``automata``: of
        their structures, one each, where ``sampling`` has one."""
        num_parts = self.engine.setup.steps_in_flight
        assert batch % num_parts == 0, f"{batch} sequences are not {num_parts} equal micro-batches"
        total = num_steps + _WARM_UP_STEPS
        # Prompts end one by one: until the last one has, others decode already.
        slack = -(-batch * context // self.engine.options.max_batch_tokens) + 1
        sequences = [self._drawn(context, total + slack, sampling) for _ in range(batch)]
        for sequence, automaton in zip(sequences, automata, strict=False):
            sequence.automaton = automaton
        await self._run(sequences)
        at = enumerate(self._arrivals)
        full = {i for i, (_, num_tokens, *_) in at if num_tokens * num_parts == batch}
        whole = [i for i in sorted(full) if full.issuperset(range(i - num_parts, i))]
        whole = whole[_WARM_UP_STEPS * num_parts :][: num_steps * num_parts]
        assert whole, "no step had all sequences in it"
        seconds = [self._arrivals[i][0] - self._arrivals[i - num_parts][0] for i in whole]
        return DecodeSteps(
            statistics.median(seconds),
            statistics.median(self._arrivals[i][2] for i in whole),
            context + slack + len(whole) / num_parts / 2,
        )

    async def complete(self, prompts: Iterable[list[int]], sampling: Sampling) -> None:
        """Generate for all prompts at once."""
        await self._run([self._sequence(prompt, sampling) for prompt in prompts])

    async def _run(self, sequences: list[Sequence]) -> None:
        self._arrivals.clear()
        for sequence in sequences:
            self.engine.add(sequence)
        while any(not sequence.finish_reason for sequence in sequences):
            self._news.clear()
            await self._news.wait()

    def _drawn(self, num_tokens: int, max_tokens: int, sampling: Sampling | None = None) -> Sequence:
        """With random tokens."""
        tokens = self._random.integers(0, self.engine.config.vocab_size, num_tokens, np.int32)
        return self._sequence(tokens, replace(sampling or Sampling(ignore_eos=True), max_tokens=max_tokens))

    def _sequence(self, tokens: npt.ArrayLike, sampling: Sampling) -> Sequence:
        self._count += 1
        ids = np.asarray(tokens, np.int32)
        name = f"bench-{self._count}"
        return Sequence(name, 0, ids, len(ids), sampling=sampling, root_key=b"", arrived_s=self._count)


@asynccontextmanager
async def session(
    config: ModelConfig, options: EngineOptions, device: str, dtype: str
) -> AsyncIterator[Session]:
    """An engine, warm; on a GPU with random weights."""
    engine = Engine(config, options, ModelOptions(device=device, dtype=dtype))
    await engine.start()
    try:
        assert engine._loop is not None
        if engine.device.torch.type == "cuda":
            randomize(engine._loop.runner.model)
            torch.cuda.synchronize()
        yield Session(engine)
    finally:
        await engine.close()
