"""Nodes of a local cluster that come and go while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence

from moonpool.conductor.fleet.providers.provider import (
    FAILED,
    REFUSED,
    RUNNING,
    STARTING,
    STOPPING,
    SuppliedNode,
)
from moonpool.local.children import Children, NoRoom, first_nodes, ready_timeout_s
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ChildFailed, MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.service.child import Child
from moonpool.runtime.service.vital import cancel_and_wait

STOP_TIMEOUT_S = 5.0
_FAILED_KEPT = 16
_NO_NODES = ("redis", "conductor")


class NodeNotSupplied(MoonpoolError):
    """This process has no node of that name, or stopped it before it ran."""

    code = "NOT_FOUND"
    failure = FailureClass.REQUEST


class ElasticNodes:
    """Starts and stops nodes among ``children``, by name, for the ``Supervisor``."""

    def __init__(
        self,
        children: dict[str, Child],
        *,
        report: Callable[[str], None],
        watch: Callable[[str], None],
        unwatch: Callable[[str], None],
        on_ended: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """``watch``: called with a node that serves, ``unwatch`` with one that is to end; ``on_ended``: with
        each task of this object that has ended.
        """
        self.children = children
        self._report = report
        self._watch = watch
        self._unwatch = unwatch
        self._on_ended = on_ended
        self._clock = asyncio.get_running_loop().time
        self._made: dict[str, Children] = {}  # by model; empty: the cluster has not started
        self._model_of: dict[str, str] = {}  # by node
        self._roles: dict[str, str] = {}  # that nodes were started with
        self._most = 0
        self._drain_s = 0.0
        self._started_s: dict[str, float] = {}
        self._ending: set[str] = set()
        self._failed: dict[str, str] = {}  # why nodes ended that are not started again
        self._switching: dict[str, asyncio.Task[None]] = {}  # nodes that change their model
        self._drain_took_s: dict[str, float] = {}  # of nodes that did, to leave the model before
        self._refused: dict[tuple[str, str], str] = {}  # why a node did not start with a model
        self._changes: set[asyncio.Task[None]] = set()

    def begin(self, config: Config, made: Mapping[str, Children], *, supervises: bool) -> None:
        """Add the children that a cluster starts with, ``made`` by model; they are not started.
        ``supervises``: conductors start others."""
        self._made = dict(made)
        self._drain_s = config.node.drain_s + config.store.flush_s
        self._most = config.cluster.most
        for model, children in first_nodes(made, on_demand=supervises).items():
            for child in children:
                self._add(child, model, child.name.partition("-")[0])

    @property
    def served_names(self) -> Sequence[str]:
        """Of the models; the first one is meant where none is named."""
        return list(self._made)

    def _of(self, model: str) -> Children:
        return self._made[model or next(iter(self._made))]

    def _add(self, child: Child, model: str, role: str) -> None:
        self.children[child.name] = child
        self._model_of[child.name], self._roles[child.name] = model, role
        self._started_s[child.name] = self._clock()

    @property
    def nodes(self) -> list[Child]:
        return [child for name, child in self.children.items() if name not in _NO_NODES]

    async def start_node(self, role: str, settings: Sequence[str] = (), model: str = "") -> str:
        """Start one more node; return its name once its process runs, long before it serves.

        Raises:
            ConfigError, TooLittleMemory, NoRoom: see ``Children.another``; or there are ``cluster.most``
                nodes. Nothing was started.
            OSError: its process could not be started.
            NodeNotSupplied: it was stopped before its process ran, which has ended.
        """
        # One that was given up has neither its GPUs nor its place any more.
        live = {child.name for child in self.nodes if self._as_supplied(child).state != FAILED}
        num_nodes = sum(self._roles[name] != "store" for name in live)
        if 0 < self._most <= num_nodes:
            raise NoRoom(f"no {role[:32]} node was started: {num_nodes} run, the most (cluster.most)")
        child = self._of(model).another(role, live, settings)
        self._add(child, model or self.served_names[0], role)
        try:
            await child.start()
            if not self.is_wanted(child.name):
                raise NodeNotSupplied(f"{child.name} was stopped before its process ran")
        except BaseException:
            # `stop_node` may have found no process to end.
            await child.stop(0.0)
            self.children.pop(child.name, None)
            raise
        self._report(f"{child.name} was asked for and starts")
        self._in_background(self._bring_up(child), child.name)
        return child.name

    def settle(self, settings: Sequence[str], model: str = "") -> None:
        """Use these settings for all later nodes. Raises ``ConfigError``."""
        self._of(model).settle(settings)

    def stop_node(self, name: str) -> None:
        """Drain and end a node, and do not start it again. Returns at once. Idempotent.

        Raises:
            NodeNotSupplied: no such node runs.
        """
        if name in self._ending:
            return
        self._child(name)
        self._ending.add(name)
        self._unwatch(name)
        self._report(f"{name} was asked to drain and end")
        self._in_background(self._take_down(name), name)

    def switch_node(self, name: str, role: str, model: str) -> None:
        """Drain a node, and start it with another model. Returns at once. Where it does not start, it is
        started with the model before it again.

        Raises:
            NodeNotSupplied: no such node runs, or it starts or ends now.
            ConfigError, TooLittleMemory, NoRoom: see ``Children.moved``. Nothing was changed.
        """
        child, former = self._child(name), self._model_of[name]
        if former == model:
            return
        if self._as_supplied(child).state != RUNNING:
            raise NodeNotSupplied(f"{name} starts or ends now: it still serves {former}, or nothing")
        successor = self._of(model).moved(name, role, self._made[former])
        self._unwatch(name)
        self._refused.pop((name, model), None)
        self._report(f"{name} was asked to leave {former} and serve {model}")
        work = self._switch(child, successor, former, self._roles[name])
        self._add(child, model, role)
        self._switching[name] = self._in_background(work, name)

    def _child(self, name: str) -> Child:
        """Raises ``NodeNotSupplied``."""
        if name not in self.children or name in _NO_NODES:
            known = ", ".join(sorted(child.name for child in self.nodes))
            raise NodeNotSupplied(f"{name[:128]} is no node of this cluster; it has {known}")
        return self.children[name]

    def supplied(self, model: str = "") -> list[SuppliedNode]:
        """The nodes, and those that ended lately because they failed; of one model, if it is named."""
        gone = [
            SuppliedNode(name, self._roles[name], FAILED, reason)
            for name, reason in self._failed.items()
            if name not in self.children
        ]
        found = [self._as_supplied(child) for child in self.nodes] + gone
        refused = [
            SuppliedNode(name, self._roles[name], REFUSED, reason)
            for (name, other), reason in self._refused.items()
            if other == model
        ]
        return refused + [one for one in found if not model or self._model_of[one.node_id] == model]

    def _as_supplied(self, child: Child) -> SuppliedNode:
        name, reason = child.name, ""
        if name in self._ending:
            state = STOPPING
        elif name in self._switching:
            state, reason = STARTING, "it changes its model"
        elif child.returncode is not None and name in self._failed:
            state, reason = FAILED, self._failed[name]
        else:
            state = RUNNING if child.ready and child.returncode is None else STARTING
        age_s, drain_s = self._clock() - self._started_s[name], self._drain_took_s.get(name, 0.0)
        return SuppliedNode(name, self._roles[name], state, reason, age_s, drain_s=drain_s)

    def gave_up(self, name: str, failure: ChildFailed | str) -> None:
        """A node has failed and is not started again."""
        self._report(str(failure))
        self._failed[name] = str(failure).partition("\n")[0]
        for old in [other for other in self._failed if other not in self.children][:-_FAILED_KEPT]:
            del self._failed[old]

    async def close(self) -> None:
        """Stop following nodes; those that start or drain stay among ``children``. Idempotent."""
        await cancel_and_wait(*self._changes)

    async def _bring_up(self, child: Child) -> None:
        """A failed first start is not repeated: the caller decides."""
        try:
            await child.wait_ready(ready_timeout_s(child))
        except ChildFailed as failure:
            if self.is_wanted(child.name):
                self.gave_up(child.name, failure)
                child.kill()
                await child.wait()
                self.children.pop(child.name, None)
            return
        if self.is_wanted(child.name):
            self._report(f"{child.name} is ready after {self._clock() - self._started_s[child.name]:.1f} s")
            self._watch(child.name)

    def is_wanted(self, name: str) -> bool:
        """Whether the node was not stopped."""
        return name in self.children and name not in self._ending

    def stays(self, name: str) -> bool:
        """Whether the node is neither stopped nor changes its model."""
        return self.is_wanted(name) and name not in self._switching

    async def _take_down(self, name: str) -> None:
        if (switching := self._switching.get(name)) is not None:
            await asyncio.wait((switching,))
        if (child := self.children.get(name)) is not None:
            await child.stop(self._drain_s + STOP_TIMEOUT_S)
            self._report(f"{name} has ended")
            self.children.pop(name, None)  # it may have failed to start meanwhile
        self._ending.discard(name)

    async def _switch(self, child: Child, successor: Child, former: str, role: str) -> None:
        """``former`` and ``role``: the model and role of ``child``."""
        name, began_s = child.name, self._clock()
        model = self._model_of[name]
        try:
            await child.stop(self._drain_s + STOP_TIMEOUT_S)
            self._drain_took_s[name] = self._clock() - began_s
            if name in self._ending:
                return
            self.children[name] = successor
            if (failure := await _failure_to_start(successor)) is not None:
                self._refused[name, model] = failure.partition("\n")[0]
                while len(self._refused) > _FAILED_KEPT:
                    del self._refused[next(iter(self._refused))]
                self._report(f"{name} does not serve {model}, and is started with {former} again: {failure}")
                self._add(child, former, role)
                if (failure := await _failure_to_start(child)) is not None:
                    self.gave_up(name, failure)
                    del self.children[name]
                    return
            took_s = self._clock() - began_s
            self._report(f"{name} serves {self._model_of[name]} after {took_s:.1f} s")
        finally:
            del self._switching[name]
        if name not in self._ending:
            self._watch(name)

    def _in_background(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(self._on_ended)
        return task


async def _failure_to_start(child: Child) -> str | None:
    """Start it, and wait until it serves. Why it does not, as a text; it has ended then."""
    try:
        await child.start()
        await child.wait_ready(ready_timeout_s(child))
    except (ChildFailed, OSError) as error:
        await child.stop(0.0)
        return str(error)
    return None
