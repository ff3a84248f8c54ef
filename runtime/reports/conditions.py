"""The conditions of a measurement beside its machine and options: model, cache, warm-up, seeds, noise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

LIMIT, PEER, BASELINE = "limit", "peer", "baseline"
KINDS = (LIMIT, PEER, BASELINE)
"""What a figure stands beside: what the machine allows, another system's, or this one's in another form."""

NONE, COLD, WARM = "none", "cold", "warm"
CACHE_STATES = (NONE, COLD, WARM)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``revision``: a digest of its config and weights. ``weights``, ``kv``: the dtypes in use."""

    name: str
    revision: str
    weights: str
    kv: str

    @classmethod
    def simulated(cls, name: str) -> ModelFacts:
        """A model that only takes time."""
        return cls(name, "none: its times are simulated", "none", "none")

    @property
    def short_revision(self) -> str:
        """The beginning of the digest, or all of the words that stand for it."""
        return self.revision if " " in self.revision else self.revision[:12]


@dataclass(frozen=True, slots=True)
class CacheState:
    """What the KV cache held when measuring began, in all tiers and with copies; ``none``: there is none."""

    state: str
    tokens: int = 0
    blocks: int = 0
    note: str = ""

    @classmethod
    def holding(cls, blocks: int, block_size: int, note: str = "") -> CacheState:
        return cls(WARM if blocks else COLD, blocks * block_size, blocks, note)


NO_CACHE = CacheState(NONE)


@dataclass(frozen=True, slots=True)
class Conditions:
    """``warm_up``: what ran before measuring. ``seeds``: by what they are of. ``rounds``: repetitions, in
    turn with what is compared. ``load``: the machine's one-minute load average, at the start and the end."""

    models: Sequence[ModelFacts]
    cache: CacheState
    warm_up: str
    seeds: Mapping[str, int]
    rounds: int = 1
    load: Sequence[float] = ()

    def as_json(self, noises: Sequence[float]) -> dict[str, Any]:
        """``noises``: those of the rows."""
        content = asdict(self)
        noise = {"rounds": content.pop("rounds"), "load": [round(load, 2) for load in content.pop("load")]}
        if noises:
            noise["spread"] = median(noises)
        return content | {"models": list(content["models"]), "noise": noise}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Conditions:
        models = [ModelFacts(**model) for model in content["models"]]
        cache, noise = CacheState(**content["cache"]), content["noise"]
        return cls(models, cache, content["warm_up"], content["seeds"], noise["rounds"], noise["load"])

    def facts(self) -> dict[str, str]:
        """What must be equal for figures to be comparable, as texts."""
        cache = self.cache
        held = f", {cache.tokens:,} tokens in {cache.blocks:,} blocks" if cache.blocks else ""
        models = (f"{m.name} {m.short_revision}, weights {m.weights}, KV {m.kv}" for m in self.models)
        return {"model": "; ".join(models), "cache": cache.state + held, "warm-up": self.warm_up}


def merged(named: Mapping[str, Conditions]) -> Conditions:
    """Those of several runs in one record; ``named``: by run."""
    every = list(named.values())
    states = {one.cache.state for one in every}
    notes = "; ".join(f"{name}: {one.cache.state}" for name, one in named.items())
    return Conditions(
        list(dict.fromkeys(model for one in every for model in one.models)),
        CacheState(
            next((state for state in (WARM, COLD) if state in states), NONE),
            max((one.cache.tokens for one in every), default=0),
            max((one.cache.blocks for one in every), default=0),
            notes,
        ),
        "; ".join(f"{name}: {one.warm_up}" for name, one in named.items()) or "nothing ran",
        {f"{name}: {of}": seed for name, one in named.items() for of, seed in one.seeds.items()},
        max((one.rounds for one in every), default=1),
        [*every[0].load[:1], *every[-1].load[-1:]] if every else [load_average()] * 2,
    )


def load_average() -> float:
    """Processes that ran or wanted to, mean of the last minute."""
    return os.getloadavg()[0]


def noise_of(samples: Sequence[float] | None) -> float | None:
    """The spread of repetitions: the middle half of ``samples`` over their median; None of fewer than 3."""
    if samples is None or len(samples) < 3:
        return None
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else None
