"""What the options of the command name: hardware, events, workloads."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import SHIPPED, Hardware, from_fields, tensor_parallel
from moonpool.simulator.inputs.scenario import ClusterEvent
from moonpool.simulator.inputs.workload import Workload


def hardware_named(name: str) -> Hardware:
    """One that is shipped, or that of a TOML or JSON file.

    Raises:
        ConfigError: there is neither, or the file does not describe a node.
    """
    if name in SHIPPED:
        return tensor_parallel(*SHIPPED[name])
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"no hardware {name!r}: a file, or one of {', '.join(SHIPPED)}", key="hardware")
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", key="hardware") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a table of a node's properties", key="hardware")
    return from_fields(str(path), content)


def with_tiers(hardware: Hardware, tokens: dict[str, int | None]) -> Hardware:
    """With other capacities, ``tokens`` by field; None: as it is. A tier without a speed gets a plain one."""
    changed: dict[str, Any] = {name: count for name, count in tokens.items() if count is not None}
    for tier, plain in (("host", 20e9), ("ssd", 3e9)):
        if changed.get(f"{tier}_tokens") and not getattr(hardware, f"{tier}_load_nbytes_per_s"):
            changed[f"{tier}_load_nbytes_per_s"] = plain
    return replace(hardware, **changed)


_EVENT = re.compile(r"([0-9.]+):(fail|join):(prefill|decode|both)(?:-([0-9]+))?")


def cluster_event(text: str) -> ClusterEvent:
    """From ``SECONDS:fail:prefill-0`` or ``SECONDS:join:decode``."""
    match = _EVENT.fullmatch(text)
    if match is None or (match[2] == "fail") != (match[4] is not None):
        raise ConfigError(f"--at {text!r} is not like 600:fail:prefill-0 or 900:join:decode", key="at")
    return ClusterEvent(float(match[1]), match[2], match[3], int(match[4] or 0))


def workload(text: str, block_tokens: int, seed: int) -> Workload:
    """From ``key=value,…``; what is not given has its default."""
    kinds = {field.name: str(field.type) for field in fields(Workload)}
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in kinds or key in ("block_tokens", "seed"):
            known = ", ".join(name for name in kinds if name not in ("block_tokens", "seed"))
            raise ConfigError(f"a workload has no {key!r}; it has {known}", key="workload")
        try:
            given[key] = _value(value, kinds[key])
        except ValueError as error:
            raise ConfigError(f"--workload {item!r}: {error}", key="workload") from error
    return Workload(**given, block_tokens=block_tokens, seed=seed)


def _value(text: str, kind: str) -> bool | int | float:
    if kind == "bool":
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    return int(text) if kind == "int" else float(text)
