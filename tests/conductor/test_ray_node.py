"""The actor of a node on Ray, without Ray around it."""

from __future__ import annotations

import errno
import tempfile
import traceback

import pytest

pytest.importorskip("ray")

from moonpool.conductor.fleet.providers.provider import FAILED
from moonpool.conductor.fleet.providers.ray_node import ENDED, RayNode
from moonpool.runtime.service.child import Child


def test_a_node_that_failed_has_ended_when_it_is_stopped() -> None:
    node = RayNode("decode-0", "decode", "these are no options", [], 0.0, 1)
    node._thread.join(60)
    role, state, reason = node.status()
    assert (role, state) == ("decode", FAILED) and reason
    node.stop()
    assert node.status() == ("decode", ENDED, reason)


@pytest.mark.parametrize(("owner", "what"), [(tempfile, "TemporaryDirectory"), (Child, "start")])
def test_a_node_whose_machine_has_no_room_has_failed(
    monkeypatch: pytest.MonkeyPatch, owner: object, what: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, what, full)
    monkeypatch.setattr(traceback, "print_exc", full)
    node = RayNode("decode-0", "decode", "", [], 0.0, 1)
    node._thread.join(60)
    assert node.status() == ("decode", FAILED, "OSError: [Errno 28] No space left on device")
    node.stop()
    assert node.status()[1] == ENDED
