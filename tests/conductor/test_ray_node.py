"""The actor of a node on Ray, without Ray around it."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from moonpool.conductor.fleet.providers.provider import FAILED
from moonpool.conductor.fleet.providers.ray_node import ENDED, RayNode


def test_a_node_that_failed_has_ended_when_it_is_stopped() -> None:
    node = RayNode("decode-0", "decode", "these are no options", [], 0.0, 1)
    node._thread.join(60)
    role, state, reason = node.status()
    assert (role, state) == ("decode", FAILED) and reason
    node.stop()
    assert node.status() == ("decode", ENDED, reason)
