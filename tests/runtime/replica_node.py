"""A daemon without a model; node.id says what it does.

"short.N" ends as soon as it is ready, "refused.1" (and only that) does not start, "slow.1" is never ready,
"busy.0" does not look at its loop for a while, "told.1" drains when there is the file that TOLD names.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.replicas.group import ReplicaGroup, replica_configs
from moonpool.runtime.replicas.identity import Replica
from moonpool.runtime.service.lifecycle import ServiceContext, run_service


async def main(config: Config, context: ServiceContext) -> None:
    if config.engine.parallel.dp > 1:
        command = [sys.executable, "-m", "tests.runtime.replica_node"]
        drain_s = config.node.drain_s + config.store.flush_s
        await ReplicaGroup(config, "test", command, replica_configs(config), drain_s=drain_s).run(context)
        return
    replica = Replica.ours()
    assert replica is not None
    if config.node.id == "refused.1":
        raise ConfigError("no, not like this")
    if config.node.id == "slow.1":
        await asyncio.Event().wait()
    url = f"http://127.0.0.1:{serve_metrics('127.0.0.1', 0).port}/metrics"
    start, secret = replica.start_number, config.security.cluster_key
    context.ready(node_id=config.node.id, start_number=start, secret=secret, metrics_url=url)
    if replica.node_id == "short":
        os._exit(3)
    if config.node.id == "told.1":
        while not os.path.exists(os.environ["TOLD"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        context.drains()
    if config.node.id == "busy.0":
        time.sleep(2 * config.engine.parallel.timeout_s)  # noqa: ASYNC251
    await context.draining.wait()
    sys.stderr.write(f"drained {config.node.id}\n")  # at once: others write there too
    if config.node.id == "stuck.1":
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(run_service(main, role="test-node"))
