"""The latest requests of an engine, where the tokens of their prompts came from, and the same as metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import Counter

from moonpool.connectors.vllm.plan import PrefixReport

# How many requests the page of an engine shows.
CAPACITY = 256

PROMPT_TOKENS = Counter(
    "moonpool_connector_prompt_tokens_total",
    "Prompt tokens of vLLM's requests by origin: engine (vLLM had them), host, ssd or peer (loaded from own "
    "memory, own disk, another engine), computed.",
    ["origin"],
)
MISSED_REQUESTS = Counter(
    "moonpool_connector_missed_requests_total",
    "Requests of vLLM with blocks that were not loaded, by reason: failed, slower, pending, evicted, layout, "
    "salted, adapter or new (docs/vllm.md).",
    ["reason"],
)
LOADS = Counter(
    "moonpool_connector_loads_total",
    "Loads of prefixes into vLLM by end: done, missing, corrupt, unreachable, error.",
    ["end"],
)
HINTS = Counter(
    "moonpool_connector_hints_total",
    "Hints of vLLM's requests by action (pin, prefetch, drop, let_go) and end: done, missing (no node has "
    "the blocks), refused (hints have their part of memory or of fetches), failed.",
    ["action", "end"],
)
UNSAVED = Counter("moonpool_connector_failed_saves_total", "Saves of vLLM's blocks that failed.")


class RequestLog:
    """Written by one thread, read by others."""

    def __init__(self, unix_clock: Callable[[], float] = time.time) -> None:
        self._unix_clock = unix_clock
        self._latest: deque[Mapping[str, Any]] = deque(maxlen=CAPACITY)

    def add(self, report: PrefixReport) -> None:
        computed = report.prompt_tokens - report.engine_tokens - report.loaded_tokens
        PROMPT_TOKENS.labels("engine").inc(report.engine_tokens)
        PROMPT_TOKENS.labels("computed").inc(computed)
        if report.tier:
            PROMPT_TOKENS.labels(report.tier).inc(report.loaded_tokens)
        if report.reason:
            MISSED_REQUESTS.labels(report.reason).inc()
        self._latest.append({"unix_s": self._unix_clock(), **asdict(report), "computed_tokens": computed})

    def latest(self) -> list[Mapping[str, Any]]:
        """Newest first."""
        return list(reversed(self._latest.copy()))
