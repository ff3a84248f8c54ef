"""Values of the commands' options: hardware, cluster events, workloads."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from moonpool.conductor.costs.model import Profile
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, tensor_parallel
from moonpool.simulator.inputs.scenario import ClusterEvent, Role
from moonpool.simulator.inputs.workload import Workload

# A tier that is given a capacity, on hardware without that tier, loads at this rate.
_LOAD_NBYTES_PER_S = {"host": 20e9, "ssd": 3e9}
_EVENT = re.compile(r"([0-9]*\.?[0-9]+):(fail|join):(prefill|decode|both)(?:-([0-9]+))?")


def hardware(name: str, capacities: Mapping[str, int | None]) -> Hardware:
    """Return shipped hardware by name, or that of a TOML or JSON file, with these capacities.

    ``capacities``: tokens by field of ``Hardware``; None leaves a field unchanged.

    Raises:
        ConfigError: there is neither, or the file does not describe a node.
    """
    found = tensor_parallel(*SHIPPED[name]) if name in SHIPPED else _hardware_file(Path(name))
    changed: dict[str, Any] = {field: tokens for field, tokens in capacities.items() if tokens is not None}
    for tier, rate in _LOAD_NBYTES_PER_S.items():
        if changed.get(f"{tier}_tokens") and not getattr(found, f"{tier}_load_nbytes_per_s"):
            changed[f"{tier}_load_nbytes_per_s"] = rate
    return replace(found, **changed)


def _hardware_file(path: Path) -> Hardware:
    if not path.exists():
        raise ConfigError(
            f"no hardware {str(path)!r}: a file, or one of {', '.join(SHIPPED)}", key="hardware"
        )
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="hardware") from error
    if not isinstance(content, dict) or not isinstance(content.get("profile"), dict):
        raise ConfigError(f"{path} must have the properties of a node, and a table 'profile'", key="hardware")
    profile = Profile.from_record(_numbers(f"{path}: profile", content.pop("profile"), Profile))
    name = str(content.pop("name", path))
    numbers = _numbers(str(path), content, Hardware)
    for needed in ("kv_token_nbytes", "pool_tokens"):
        if needed not in numbers:
            raise ConfigError(f"{path}: {needed} is missing", key="hardware")
    return Hardware(name=name, profile=profile, **numbers)


def _numbers(where: str, given: Mapping[str, Any], kind: type[Hardware | Profile]) -> dict[str, Any]:
    """Return ``given`` after checking that it has fields of ``kind`` alone, each a number of 0 or more.

    Whole numbers may be written as 1e6.
    """
    known = {field.name for field in fields(kind)}
    whole = {field.name for field in fields(kind) if field.type == "int"}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown {key}; known are {', '.join(sorted(known))}", key="hardware")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise ConfigError(f"{where}: {key} must be a number of 0 or more, got {value!r}", key="hardware")
        if key in whole and not float(value).is_integer():
            raise ConfigError(f"{where}: {key} must be a whole number, got {value!r}", key="hardware")
    return {key: int(value) if key in whole else value for key, value in given.items()}


def cluster_event(text: str) -> ClusterEvent:
    """Read ``SECONDS:fail:prefill-0`` or ``SECONDS:join:decode``."""
    match = _EVENT.fullmatch(text)
    if match is None or (match[2] == "fail") != (match[4] is not None):
        raise ConfigError(f"--at {text!r} is not like 600:fail:prefill-0 or 900:join:decode", key="at")
    kind, role = cast('Literal["fail", "join"]', match[2]), cast(Role, match[3])
    return ClusterEvent(float(match[1]), kind, role, int(match[4] or 0))


def workload(text: str, block_tokens: int, seed: int) -> Workload:
    """Read ``key=value,…``; other fields have their defaults."""
    given: dict[str, Any] = dict(item.partition("=")[::2] for item in text.split(",") if item)
    known = [field.name for field in fields(Workload) if field.name not in ("block_tokens", "seed")]
    for key in given:
        if key not in known:
            raise ConfigError(f"a workload has no {key!r}; it has {', '.join(known)}", key="workload")
    try:
        return msgspec.convert({**given, "block_tokens": block_tokens, "seed": seed}, Workload, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--workload {text}: {error}", key="workload") from error
