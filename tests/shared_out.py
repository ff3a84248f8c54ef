"""How ``pytest -n auto --dist loadfile`` shares the tests out, as `make test` does.

A file's tests stay together, for its fixtures' sake. Files that start whole clusters keep to half of the
workers while there are others to run: their processes take a core and more, and leases and deadlines run
meanwhile. Tests marked ``alone`` come last, one after another, when every other worker has ended; so do those
of a GPU, which take what memory it has.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

ALONE = "alone"
MOST_WORKERS = 8
# A worker has torch, transformers and their models, and a cluster of five processes beside it.
WORKER_NBYTES = 3 << 30
CLUSTERS = tuple(
    f"tests/{name}/"
    for name in ("attack", "cluster", "dashboard", "deploy", "docs", "moonpool", "store_node")
)
# What has a cluster in common.
_NAMES = ("callers", "conductors", "isolation", "migration", "replication", "serving")
_SHARED = tuple(f"tests/cluster/test_{name}.py" for name in _NAMES)
TOGETHER = {
    "tests/cluster/shared": (*_SHARED, "tests/deploy/", "tests/docs/"),
    "tests/dashboard/": ("tests/dashboard/",),
    "tests/attack/": ("tests/attack/",),
}
# Each test is a unit of its own: they take long, and share nothing.
APART = ("tests/kernels/test_interpreted.py", "tests/transfer/test_leaks.py")
# They take minutes: begun last, they would run while other workers have nothing left.
FIRST = (
    *("tests/test_sanitizers.py", "tests/objects/test_linearizable.py", "tests/packaging/test_wheel.py"),
    *("tests/connectors/test_outputs.py", "tests/connectors/test_vllm_failures.py"),
)


def num_workers(cores: int, free_nbytes: int) -> int:
    """Workers for a machine; 0: the tests run in pytest's own process."""
    # One more than cores: tests also wait, for processes, disks and deadlines.
    workers = min(cores + 1 if cores > 1 else 1, free_nbytes // WORKER_NBYTES, MOST_WORKERS)
    return workers if workers > 1 else 0


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None  # xdist reads it
    if len(config.args) == 1 and ".py" in config.args[0]:
        return 0  # one file is not shared out, and workers take seconds to start
    return num_workers(len(os.sched_getaffinity(0)), psutil.virtual_memory().available)


# Tracebacks come at the end, which a run that is stopped for taking too long does not reach.
@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and reporter is not None and config.get_verbosity() <= 0:
        reporter.write_line(f"\nFAILED {report.nodeid}")


# Markers are known where tests were collected, in the workers; they write down whom they concern.
_PATH = pytest.StashKey[Path]()


def pytest_configure_node(node: WorkerController) -> None:
    if _PATH not in node.config.stash:
        handle, path = tempfile.mkstemp(prefix="moonpool-alone-")
        os.close(handle)
        node.config.stash[_PATH] = Path(path)
    node.workerinput[ALONE] = str(node.config.stash[_PATH])


@pytest.hookimpl(tryfirst=True)  # before xdist tells that it has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    if worker := getattr(session.config, "workerinput", None):
        path = Path(worker[ALONE])
        alone = [
            item.nodeid
            for item in session.items
            if item.get_closest_marker(ALONE) or item.get_closest_marker("gpu")
        ]
        own = path.with_suffix(f".{worker['workerid']}")
        own.write_text(json.dumps(alone))
        own.replace(path)  # whole, and the same from every worker


def pytest_unconfigure(config: pytest.Config) -> None:
    if path := config.stash.get(_PATH, None):
        path.unlink(missing_ok=True)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    return Scheduling(config, log, lambda: json.loads(config.stash[_PATH].read_text()))


class Scheduling(LoadScopeScheduling):
    """A unit of work is a file, what is TOGETHER, a test of a file APART, or all tests that run ALONE.

    ``read_alone`` is asked for the ids of those when all workers have collected.
    """

    def __init__(self, config: pytest.Config, log: Any, read_alone: Callable[[], list[str]]) -> None:
        super().__init__(config, log)
        self._read_alone = read_alone
        self._alone: frozenset[str] = frozenset()

    def schedule(self) -> None:
        if self.collection is None:
            self._alone = frozenset(self._read_alone())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self._alone:
            return ALONE
        path = nodeid.partition("::")[0]
        if path in APART:
            return nodeid
        return next((name for name, files in TOGETHER.items() if path.startswith(files)), path)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        if list(self.workqueue) == [ALONE]:
            for other in self.nodes:
                self._reschedule(other)  # whoever waits for this one to end

    def _reschedule(self, node: WorkerController) -> None:
        if list(self.workqueue) == [ALONE] and not node.shutting_down:
            others = [other for other in self.nodes if other is not node]
            if not all(other.shutting_down for other in others):
                node.shutdown()  # when it has run what it has
                return
            if any(self._pending_of(self.assigned_work[other]) for other in others):
                return
        super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if scope := self._next_scope(node):
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    def _next_scope(self, node: WorkerController) -> str | None:
        """What ``node`` is to run next; None while it has to wait for the others."""
        busy = [
            {scope for scope, tests in work.items() if not all(tests.values())}
            for other, work in self.assigned_work.items()
            if other is not node
        ]
        scopes = sorted((scope for scope in self.workqueue if scope != ALONE), key=lambda s: s not in FIRST)
        if not scopes:
            return None if any(busy) else ALONE
        clusters = sum(any(scope.startswith(CLUSTERS) for scope in work) for work in busy)
        wanted = clusters < max(1, len(self.nodes) // 2)
        return next((scope for scope in scopes if scope.startswith(CLUSTERS) == wanted), scopes[0])
