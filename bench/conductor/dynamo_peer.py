"""Prefix matching beside that of Dynamo's RadixTree, as its Python binding gives it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter

from moonpool.bench.conductor.population import Population
from moonpool.bench.harness.peer_environment import PeerFailed, python_of
from moonpool.runtime.reports.report import Row

_NUM_NODES, _NUM_BLOCKS = 16, 1_000_000
_LOOKUPS = 2000
_ROUNDS = 5


def dynamo_rows() -> list[Row]:
    """Both in turn, on equally made data. Raises ``PeerAbsent`` with the command that installs it."""
    python = python_of("dynamo", ["ai-dynamo-runtime==1.6.1"])
    child = Path(__file__).with_name("dynamo_child.py")
    population = Population(_NUM_NODES, _NUM_BLOCKS, "goodput")
    # -P: or this folder's dynamo.py would be taken for the package.
    command = [str(python), "-P", str(child), str(_NUM_NODES), str(_NUM_BLOCKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise PeerFailed("Dynamo's RadixTree could not be filled; its own message is above")
            ours, theirs, hops = [], [], []
            for _ in range(_ROUNDS):
                ours.append(_match(population))
                process.stdin.write(f"{_LOOKUPS}\n")
                process.stdin.flush()
                seconds, hop = json.loads(process.stdout.readline())
                theirs.append(seconds)
                hops.append(hop)
        finally:
            process.kill()
    case = f"prefix matching, {_NUM_NODES} nodes, {_NUM_BLOCKS:,} blocks, prompts of 128 blocks"
    mine, other, hop = (median(times) * 1e6 for times in (ours, theirs, hops))
    return [
        Row(case, "a lookup", mine, "µs", peer="dynamo", peer_value=other, ratio=mine / other),
        Row(case, "of Dynamo's, the hop to its thread and back (an empty lookup)", hop, "µs"),
    ]


def _match(population: Population) -> float:
    seconds = []
    for _ in range(_LOOKUPS):
        keys = population.question().keys
        began_s = perf_counter()
        population.match(keys)
        seconds.append(perf_counter() - began_s)
    return median(seconds)
