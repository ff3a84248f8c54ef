"""How tests are shared out to workers: nothing beside a test that runs alone, few clusters at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared_out import ALONE, APART, CLUSTERS, FIRST, Scheduling, num_workers

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
FOLDERS = ("cluster", "docs", "dashboard", "kvstore", "engine")


def is_alone(test: str) -> bool:
    return test.endswith("_alone")


class Worker:
    """As xdist's: it begins a test only when it knows of the next one, or that there is none."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down, "a worker was given work after its end was announced"
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def runs(self) -> int | None:
        """The test that it runs now."""
        return self.queue[0] if len(self.queue) > 1 or (self.queue and self.shutting_down) else None


def session(num_workers: int, tests: list[str], choose: Any) -> list[tuple[list[str], list[str]]]:
    """What ran at the same time, and the files nobody had yet: from one end of a test to the next."""
    config: Any = SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=False),
        getvalue=lambda name: ["popen"] * num_workers,
        rootpath="",
    )
    scheduling = Scheduling(
        config, SimpleNamespace(loadscopesched=lambda *words: None), lambda: list(filter(is_alone, tests))
    )
    workers: list[Any] = [Worker(f"gw{number}") for number in range(num_workers)]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    together: list[tuple[list[str], list[str]]] = []
    while busy := [worker for worker in workers if worker.runs is not None]:
        together.append(([tests[worker.runs] for worker in busy], list(scheduling.workqueue)))
        worker = choose(busy)
        scheduling.mark_test_complete(worker, worker.queue.pop(0))
        if scheduling.tests_finished:
            for other in scheduling.nodes:
                other.shutdown()
    assert all(not worker.queue and worker.shutting_down for worker in workers)
    return together


@st.composite
def collections(draw: st.DrawFn) -> list[str]:
    """Ids of tests, file by file, some of them to run alone."""
    files = draw(st.lists(st.sampled_from(FOLDERS), min_size=1, max_size=12))
    return [
        f"tests/{folder}/test_{file}.py::test_{number}" + "_alone" * draw(st.booleans())
        for file, folder in enumerate(files)
        for number in range(draw(st.integers(1, 5)))
    ]


@settings(max_examples=40)
@given(st.integers(1, 5), collections(), st.data())
def test_everything_runs_once_and_alone_is_alone(
    num_workers: int, tests: list[str], data: st.DataObject
) -> None:
    together = session(num_workers, tests, lambda busy: data.draw(st.sampled_from(busy)))
    # One test ends at a time, so there are as many steps as tests.
    assert len(together) == len(tests)
    assert {test for step, _ in together for test in step} == set(tests)
    for step, _ in together:
        assert len(step) == 1 or not any(map(is_alone, step))


@settings(max_examples=40)
@given(st.integers(2, 6), collections(), st.data())
def test_clusters_keep_to_half_of_the_workers_while_there_is_something_else(
    num_workers: int, tests: list[str], data: st.DataObject
) -> None:
    together = session(num_workers, tests, lambda busy: data.draw(st.sampled_from(busy)))
    for step, waiting in together:
        clusters = {
            test.partition("::")[0] for test in step if not is_alone(test) and test.startswith(CLUSTERS)
        }
        if any(not file.startswith((*CLUSTERS, ALONE)) for file in waiting):
            assert len(clusters) <= max(1, num_workers // 2)


def test_tests_of_a_file_apart_run_at_the_same_time() -> None:
    first, _ = session(2, [f"{APART[0]}::test_it[{number}]" for number in range(4)], lambda busy: busy[0])[0]
    assert len(first) == 2


def test_what_takes_minutes_begins_first() -> None:
    tests = [f"tests/kvstore/test_{number}.py::test_it" for number in range(5)]
    first, _ = session(2, [*tests, f"{FIRST[0]}::test_it"], lambda busy: busy[0])[0]
    assert f"{FIRST[0]}::test_it" in first


@pytest.mark.parametrize(
    ("cores", "free_gib", "workers"),
    [(1, 64, 0), (2, 20, 3), (2, 6, 2), (2, 5, 0), (64, 256, 8), (64, 14, 4)],
)
def test_workers_are_as_many_as_cores_and_memory_allow(cores: int, free_gib: int, workers: int) -> None:
    assert num_workers(cores, free_gib * GIB) == workers


# Says when it ran.
TEST = """
import pathlib, pytest, time

@pytest.mark.parametrize("marked", [pytest.param(True, marks=pytest.mark.alone), False, False])
def test_says(marked):
    began_s = time.monotonic()
    time.sleep(0.2)
    with pathlib.Path("said").open("a") as said:
        said.write(f"{int(marked)} {began_s} {time.monotonic()}\\n")
"""


def test_real_workers_run_alone_what_is_marked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.shared_out"]')
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [[float(word) for word in line.split()] for line in (tmp_path / "said").read_text().splitlines()]
    assert len(said) == 6
    # xdist keeps a worker's last test back until it knows of another one.
    *_, last_s, _ = sorted(end_s for marked, _, end_s in said if not marked)
    for marked, began_s, end_s in said:
        assert not marked or began_s >= last_s
        last_s = max(last_s, end_s if marked else 0)
