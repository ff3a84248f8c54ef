"""The ways of the network that histories are played on are cut as told, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.objects.network import Network
from tests.transfer.cables import obstacle

ANSWERS = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
while True:
    listener.accept()[0].sendall(b"here")
"""
# No connection, and nobody says why: what is sent is swallowed.
ASKS = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).recv(4).decode())
except TimeoutError:
    print("nothing")
"""


def test_a_cut_way_swallows_what_is_sent_and_others_do_not() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    network = Network(("a", "b", "c"))

    def hears(asker: str, within_s: float = 60.0) -> bool:
        asks = [sys.executable, "-S", "-c", ASKS, network.address("a"), str(within_s)]
        command = [*network.within(asker), *asks]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"here": True, "nothing": False}[done.stdout.strip()]

    def is_cut(asker: str) -> bool:
        return not hears(asker, within_s=0.3)

    command = [*network.within("a"), sys.executable, "-S", "-c", ANSWERS, network.address("a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            assert hears("b") and hears("c")
            for way in (("a", "b"), ("b", "a")):
                network.cut(*way)
                assert is_cut("b") and hears("c")
                network.mend(*way)
            network.cut(receiver="a")
            assert is_cut("b") and is_cut("c")
            network.mend(receiver="a")
            assert hears("b") and hears("c")
        finally:
            server.kill()
            network.close()
