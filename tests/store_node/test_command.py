"""``moonpool store`` as it is typed, with right input and wrong."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from tests.forked import run_module
from tests.store_node.conftest import StoreCluster


class Shell:
    def __init__(self, url: str) -> None:
        self.url = url

    async def __call__(self, command: str, *options: str, stdin: bytes = b"") -> tuple[int, str]:
        """Exit code, and what was printed."""
        return await run_module("moonpool", "store", command, *options, "--url", self.url, stdin=stdin)


async def test_objects_come_and_go_by_hand(cluster: StoreCluster, tmp_path: Path) -> None:
    await asyncio.gather(cluster.start("a"), cluster.start("b"))
    store = Shell(cluster.url)
    file, back = tmp_path / "weights.bin", tmp_path / "back.bin"
    file.write_bytes(bytes(range(256)) * 1000)
    puts = await asyncio.gather(
        store("put", str(file), "--copies", "2", "--ttl", "1000", "--pin", "hard"),
        store("put", "-", "--name", "said", stdin=b"hello"),
    )
    assert [code for code, _ in puts] == [0, 0], puts
    got, said, listed, described, nodes, checked = await asyncio.gather(
        store("get", "weights.bin", str(back)),
        store("get", "said"),
        store("ls", "w"),
        store("stat", "weights.bin", "--json"),
        store("stat", "--json"),
        store("verify"),
    )
    assert got[0] == 0, got
    assert back.read_bytes() == file.read_bytes()
    assert said == (0, "hello")
    assert "weights.bin" in listed[1]
    assert "said" not in listed[1]
    stat = json.loads(described[1])
    assert (stat["nodes"], stat["copies"], stat["pin"]) == (["a", "b"], 2, "hard")
    assert 0 < stat["expires_s"] - time.time() < 1000
    assert "hard" in listed[1]
    assert {row["node"] for row in json.loads(nodes[1])} == {"a", "b"}
    assert (checked[0], "0 damaged" in checked[1]) == (0, True), checked
    assert await store("evict", "said") == (0, "1 of 1 objects dropped\n")
    assert (await store("get", "said"))[0] == 1


async def test_what_goes_wrong_is_a_sentence(cluster: StoreCluster, tmp_path: Path) -> None:
    store, nowhere = Shell(cluster.url), Shell("redis://127.0.0.1:1")
    code, text = await store("ls")
    assert (code, "moonpool store-node" in text) == (1, True), text
    await cluster.start("a", index__lease_ttl_s=60.0)
    file = tmp_path / "x"
    file.write_bytes(b"x")
    assert (await store("put", str(file)))[0] == 0
    cases = {
        "/none is not a file": (2, store("put", "/none")),
        "is not a file": (2, store("put", str(tmp_path))),
        "give it one with --name": (2, store("put", "-")),
        "there is no store node 'z'; there are a": (2, store("put", str(file), "--node", "z")),
        "1 to 4096 bytes": (2, store("put", str(file), "--name", "")),
        "it can be on 1 hosts, 2 were requested": (
            1,
            store("put", str(file), "--name", "y", "--copies", "2"),
        ),
        "there is no object 'none'": (1, store("get", "none", str(tmp_path / "out"))),
        "cannot be written: there is no directory": (2, store("get", "x", str(tmp_path / "none" / "out"))),
        "name the objects to drop, or give --all": (2, store("evict")),
        "is not the URL of a store": (2, Shell("ftp://x")("ls")),
        "check that it runs": (1, nowhere("ls")),
    }
    answers = await asyncio.gather(*(call for _, call in cases.values()))
    for (sentence, (code, _)), answer in zip(cases.items(), answers, strict=True):
        assert answer[0] == code, answer
        assert sentence in answer[1].replace("\n", " "), answer
    assert not (tmp_path / "out").exists()
    await cluster.kill("a")
    for answer in await asyncio.gather(store("get", "x", str(tmp_path / "out")), store("ls")):
        assert (answer[0], "none of the store nodes answers (a)" in answer[1]) == (1, True), answer
    assert (await store("verify"))[0] == 1
