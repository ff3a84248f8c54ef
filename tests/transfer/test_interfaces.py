"""UCX beside network interfaces that come and go, as those of containers do."""

from __future__ import annotations

import subprocess
import threading

import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer.agent import TransferAgent
from tests.transfer.cables import obstacle

pytestmark = [pytest.mark.alone, pytest.mark.skipif(bool(why := obstacle()), reason=why)]

FLAP = (
    "ip link add {0}n type veth peer name {0}f && ip address add 198.18.255.1/24 dev {0}n && "
    "ip link set {0}n up && ip link set {0}f up; ip link delete {0}n"
)


@pytest.mark.slow
async def test_agents_start_while_an_interface_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    ended = threading.Event()

    def flap() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            subprocess.run(FLAP.format(f"mpflap{number % 7}"), shell=True, capture_output=True, check=False)

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        for _ in range(500):
            agent = await TransferAgent.start(TransferOptions(transports=("ucx",)), agent_id="here", epoch=1)
            await agent.close()
    finally:
        ended.set()
        flapping.join()
