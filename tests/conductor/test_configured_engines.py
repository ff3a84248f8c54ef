"""Engines named in the configuration of a conductor."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from moonpool.conductor.engines import configured
from moonpool.conductor.engines.configured import EngineEntry
from moonpool.conductor.fleet.errors import FleetUnchanged
from moonpool.runtime.errors import ConfigError
from tests.conductor.core_nodes import PROMPT, continuation, running
from tests.conductor.core_nodes import request as asked
from tests.conductor.engine_server import KEY, EngineServer, state_of


async def test_they_take_requests_in_their_roles(url: str) -> None:
    async with AsyncExitStack() as stack:
        servers = [EngineServer("p", role="prefill"), EngineServer("d", role="decode")]
        entries = []
        for server in servers:
            entries.append(f"{await server.listen()} role={server.role} model=served")
            stack.push_async_callback(server.die)
        cluster = await stack.enter_async_context(
            running(url, namespace="configured", engine_key=KEY, engines=tuple(entries))
        )
        names = [EngineEntry.parse(entry).node_id for entry in entries]
        await cluster.until(lambda: all(state_of(cluster, name) == "ready" for name in names))
        assert await cluster.generate(asked()) == continuation(PROMPT, 8)
        timeline = cluster.conductor.timeline("r")
        assert timeline is not None
        assert [timeline.summary.prefill_node, timeline.summary.decode_node] == names
        given = {"do_remote_prefill": True, "remote_engine_id": "p"}
        assert servers[1].bodies[0]["kv_transfer_params"] == given
        # They keep their roles: an operator is told so, and a planner counts on no change.
        assert not any(map(cluster.conductor._planner._can_switch, names, ("prefill", "decode")))
        with pytest.raises(FleetUnchanged, match="is an engine of another project: start it again"):
            await cluster.conductor.fleet.switch_role(names[0], "decode")


async def test_one_that_serves_another_model_is_not_used(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configured, "_ASK_EVERY_S", 0.01)
    engine = EngineServer("other")
    engine.model = "other"
    entry = f"{await engine.listen()} model=served"
    async with running(url, namespace="other", engine_key=KEY, engines=(entry,)) as cluster:
        try:
            await cluster.until(lambda: "it serves other, not served" in caplog.text)
            assert not cluster.conductor.cluster()["nodes"]
            engine.model = "served"
            await cluster.until(lambda: state_of(cluster, EngineEntry.parse(entry).node_id) == "ready")
            assert await cluster.generate(asked()) == continuation(PROMPT, 8)
        finally:
            await engine.die()


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8001", "http://h:1 role=store", "http://h:1 weight=2", "ftp://h"]
)
def test_what_is_no_engine_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"conductor\.engines"):
        EngineEntry.parse(text)
