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
    print(socket.create_connection((sys.argv[1], 5000), 0.3).recv(4).decode())
except TimeoutError:
    print("nothing")
"""


def test_a_cut_way_swallows_what_is_sent_and_others_do_not() -> None:
    if reason := obstacle():
        pytest.skip(reason)
    network = Network(("a", "b", "c"))

    def heard(asker: str) -> str:
        command = [*network.within(asker), sys.executable, "-S", "-c", ASKS, network.address("a")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    command = [*network.within("a"), sys.executable, "-S", "-c", ANSWERS, network.address("a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            assert [heard("b"), heard("c")] == ["here", "here"]
            for way in (("a", "b"), ("b", "a")):
                network.cut(*way)
                assert [heard("b"), heard("c")] == ["nothing", "here"]
                network.mend(*way)
            network.cut(receiver="a")
            assert [heard("b"), heard("c")] == ["nothing", "nothing"]
            network.mend(receiver="a")
            assert [heard("b"), heard("c")] == ["here", "here"]
        finally:
            server.kill()
            network.close()
