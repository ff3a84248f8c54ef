"""Reads a LoRA adapter in PEFT's format, checked against the model before any of it is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import Derived
from moonpool.engine.errors import AdapterRefused
from moonpool.engine.sharding.tensor_slices import expected_tensors

SETTINGS_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The projections that may have an adapter, by their modules' names."""

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_DIGEST_NBYTES = 16
_HEADER_NBYTES = 4 << 20
# Settings that change more than the products of A and B, and their values that do not.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None,),
}
# These change the base model's weights, too, unless PEFT has converted the adapter.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def targets(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The modules of the model that may have an adapter, with (outputs, inputs). Latent attention and
    experts have none."""
    if config.latent is not None:
        return {}
    found = {}
    for name, shape in expected_tensors(config).items():
        module, _, kind = name.rpartition(".")
        parent, _, projection = module.rpartition(".")
        dense = parent.rpartition(".")[2] in ("self_attn", "mlp")
        if kind == "weight" and dense and projection in PROJECTIONS and ".experts." not in name:
            found[module] = (shape[0], shape[1])
    return found


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapter of one module: y += (x @ a.T) @ b. a: [rank, in]; b: [rank, out], scaled."""

    a: Tensor
    b: Tensor


class PeftAdapter:
    """The directory ``path`` as read once: what it says and what is used are the same bytes.

    digest: 32 hex digits of both files. rank: the largest of its modules. factors: by module of ``targets``.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Raises AdapterRefused, which names the file."""
        self.path = path
        self._config = config
        self._targets = targets(config)
        if not self._targets:
            raise self._refused(SETTINGS_FILE, f"models of the family {config.family} take no adapters here")
        settings_bytes = self._read(SETTINGS_FILE, _HEADER_NBYTES)
        values = sum(map(sum, self._targets.values()))
        weights_bytes = self._read(WEIGHTS_FILE, _HEADER_NBYTES + 4 * MAX_RANK * values)
        digest = blake2b(digest_size=_DIGEST_NBYTES, person=b"moonpool-lora")
        for part in (settings_bytes, weights_bytes):
            digest.update(len(part).to_bytes(8, "little") + part)
        self.digest = digest.hexdigest()
        self._settings = self._parse_settings(settings_bytes)
        self.factors = dict(self._factors(self._parse_weights(weights_bytes)))
        self.rank = max(len(one.a) for one in self.factors.values())

    @classmethod
    def read(cls, path: Path, digest: str, config: ModelConfig) -> PeftAdapter:
        """Read the adapter that ``digest`` names. Raises AdapterRefused, also for another content."""
        adapter = cls(path, config)
        if adapter.digest != digest:
            raise adapter._refused(WEIGHTS_FILE, "its content has changed since it was loaded: load it anew")
        return adapter

    def _refused(self, file: str, reason: str) -> AdapterRefused:
        return AdapterRefused(self.path / file, reason)

    def _read(self, file: str, most_nbytes: int) -> bytes:
        path = self.path / file
        try:
            nbytes = path.stat().st_size
            if nbytes > most_nbytes:
                reason = f"it has {nbytes:,} bytes; an adapter of rank {MAX_RANK} has at most {most_nbytes:,}"
                raise self._refused(file, reason)
            return path.read_bytes()
        except OSError as error:
            reason = f"it cannot be read: {error.strerror}"
            if file == WEIGHTS_FILE and (self.path / "adapter_model.bin").exists():
                reason = "it is missing; adapter_model.bin is not read: save the adapter as safetensors"
            raise self._refused(file, reason) from error

    # ------------------------------------------------------------------ adapter_config.json

    def _parse_settings(self, data: bytes) -> dict[str, Any]:
        try:
            settings = json.loads(data)
        except ValueError as error:
            raise self._refused(SETTINGS_FILE, f"it is not JSON: {error}") from error
        if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
            kind = settings.get("peft_type") if isinstance(settings, dict) else settings
            raise self._refused(SETTINGS_FILE, f"peft_type is {str(kind)[:64]!r}; only LORA is served")
        for name, plain in _UNSUPPORTED.items():
            if settings.get(name) not in plain:
                raise self._refused(
                    SETTINGS_FILE,
                    f"{name} is {str(settings[name])[:64]}: an adapter may only have lora_A and lora_B of "
                    f"{', '.join(PROJECTIONS)}",
                )
        start = settings.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise self._refused(
                SETTINGS_FILE,
                f"init_lora_weights is {start[:64]!r}, which changes the base model: save the adapter with "
                "path_initial_model_for_weight_conversion",
            )
        return settings

    def _number(self, name: str, value: Any, least: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._refused(SETTINGS_FILE, f"{name} must be a number, is {str(value)[:64]!r}")
        if value < least:
            raise self._refused(SETTINGS_FILE, f"{name} must be at least {least}, is {value}")
        return float(value)

    def _of_module(self, pattern: str, module: str, default: Any) -> Any:
        """A module's value by ``rank_pattern`` or ``alpha_pattern``, matched as PEFT does."""
        found = self._settings.get(pattern) or {}
        if not isinstance(found, dict):
            raise self._refused(SETTINGS_FILE, f"{pattern} must be an object")
        for key, value in found.items():
            try:
                if re.match(rf"(.*\.)?({key})$", module):
                    return value
            except re.error as error:
                raise self._refused(SETTINGS_FILE, f"{pattern}: {key[:64]!r}: {error}") from error
        return default

    def _scale(self, module: str, rank: int) -> float:
        said = self._of_module("rank_pattern", module, self._settings.get("r"))
        if said != rank:
            raise self._refused(WEIGHTS_FILE, f"{module} has rank {rank}; {SETTINGS_FILE} says {said}")
        alpha = self._number(
            "lora_alpha", self._of_module("alpha_pattern", module, self._settings.get("lora_alpha", 8)), 0
        )
        return alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)

    # ------------------------------------------------------------------ adapter_model.safetensors

    def _parse_weights(self, data: bytes) -> dict[str, dict[str, Tensor]]:
        """Return the matrices by module as stored, and "A" or "B"."""
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise self._refused(WEIGHTS_FILE, f"it is corrupt: {error}") from error
        modules: dict[str, dict[str, Tensor]] = {}
        for name in sorted(tensors):  # the file has no order of its own: the same error each time
            tensor = tensors[name]
            found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
            if found is None:
                raise self._refused(
                    WEIGHTS_FILE,
                    f"{name[:128]} is no lora_A or lora_B of a projection: embeddings, biases and whole "
                    "modules are not served",
                )
            if not tensor.is_floating_point() or tensor.dim() != 2 or not torch.isfinite(tensor).all():
                raise self._refused(WEIGHTS_FILE, f"{name[:128]} is no matrix of finite numbers")
            modules.setdefault(found[1], {})[found[2]] = tensor
        if not modules:
            raise self._refused(WEIGHTS_FILE, "it has no tensors")
        return modules

    def _factors(self, modules: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, Factors]]:
        """Yield the factors of each module of the model, which may have another name in the checkpoint."""
        stored = _sources(self._config, self._targets)
        unknown = [module for module in modules if module not in stored]
        if unknown:
            base = str(self._settings.get("base_model_name_or_path"))[:128]
            raise self._refused(
                WEIGHTS_FILE,
                f"{unknown[0][:128]} is no projection of {self._config.path.name} that takes an adapter; the "
                f"adapter was made for {base}",
            )
        for module, found in modules.items():
            outs, ins, parts = stored[module]
            a, b = found.get("A"), found.get("B")
            if a is None or b is None:
                raise self._refused(WEIGHTS_FILE, f"{module} lacks lora_{'B' if b is None else 'A'}")
            rank = len(a)
            if not 1 <= rank <= MAX_RANK:
                raise self._refused(WEIGHTS_FILE, f"{module} has rank {rank}; served are 1 to {MAX_RANK}")
            if a.shape != (rank, ins) or b.shape != (outs, rank):
                raise self._refused(
                    WEIGHTS_FILE,
                    f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; "
                    f"{self._config.path.name} needs [{rank}, {ins}] and [{outs}, {rank}]: "
                    "it is for another base model",
                )
            scaled = b.float() * self._scale(module, rank)
            for target, derived in parts.items():
                rows = scaled if derived is None else derived.make(scaled)
                assert isinstance(rows, Tensor)
                yield target, Factors(a, rows.T.contiguous())


def _sources(
    config: ModelConfig, modules: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int, dict[str, Derived | None]]]:
    """The modules as the checkpoint names them: outputs, inputs, and the modules made of each, with how their
    rows are taken (None: all, in order)."""
    derived = {} if config.derived is None else config.derived(config)
    found: dict[str, tuple[int, int, dict[str, Derived | None]]] = {}
    for module, (outs, ins) in modules.items():
        source = derived.get(f"{module}.weight")
        if source is None:
            found[module] = (outs, ins, {module: None})
        elif len(source.sources) == 1:
            ((name, shape),) = source.sources.items()
            whole = found.setdefault(name.removesuffix(".weight"), (shape[0], shape[1], {}))
            whole[2][module] = source
    return found
