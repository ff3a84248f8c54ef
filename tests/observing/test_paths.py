"""Transfer paths of all nodes together, from what each tells of itself."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.observing.transfer_paths import paths_of
from moonpool.kvstore.index.redis.node_record import NodeRecord


def node(paths: Any) -> NodeRecord:
    return NodeRecord("a", 1, "decode", extra={"paths": paths})


def test_nodes_add_up() -> None:
    one = {"nbytes": 100, "seconds": 0.5, "batches": 10, "failures": 1, "retries": 1, "in_flight": 2}
    buckets = {"buckets": [[0.1, 5], [1.0, 10]]}
    (shm, tcp) = paths_of([node({"shm": one | buckets}), node({"shm": one | buckets, "tcp": one})])
    assert (shm["path"], shm["nbytes"], shm["batches"], shm["in_flight"]) == ("shm", 200, 20, 4)
    assert shm["p50_s"] == pytest.approx(0.1)
    assert shm["p99_s"] == pytest.approx(0.1 + 0.9 * 0.98)
    assert (tcp["retries"], tcp["p50_s"]) == (1, None)


def test_nothing_was_moved() -> None:
    idle = {"nbytes": 0, "batches": 0, "buckets": [[0.1, 0]]}
    assert paths_of([]) == []
    assert paths_of([node({"shm": idle})])[0]["p50_s"] is None


@pytest.mark.parametrize("paths", [None, 3, [], {"shm": 3}, {"shm": {"nbytes": "x", "buckets": [["a", 1]]}}])
def test_nonsense_is_left_out(paths: Any) -> None:
    assert all(path["nbytes"] == 0 for path in paths_of([node(paths)]))


def test_the_number_of_paths_is_bounded() -> None:
    assert len(paths_of([node({str(number): {} for number in range(100)})])) == 16
