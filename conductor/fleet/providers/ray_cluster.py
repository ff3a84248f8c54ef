"""The calls to Ray that its provider makes. They block; import takes a second."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

# Before its import: nothing is reported to Ray's makers.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray ends a process that has lost its connection to the control store for this long; its default is a minute.
# A conductor serves on.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(10 * 365 * 24 * 3600))

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, STARTING
from moonpool.conductor.fleet.providers.ray_node import ENDED, RayNode, RayRankHost

__all__ = ["RayCluster", "RayError", "Resources", "is_here"]

# Of one node, over its whole life: Ray counts no pauses between them.
_MAX_RESTARTS = 5
_ANSWER_S = 5.0
_LIST_S = 2.0  # pending actors do not answer
_NAMESPACE = "moonpool"

# A process has one connection to Ray, which the last of its users closes.
_users = 0
_users_lock = threading.Lock()
# It warns of restarts within a placement group, which are wanted here, and of signals that others handle.
logging.getLogger("ray").setLevel(logging.ERROR)


class RayFence:
    """The epoch of the latest planner that has changed a fleet: an actor, for all conductors together."""

    def __init__(self) -> None:
        self._latest = 0

    def latest(self, epoch: int) -> int:
        """Return it, with ``epoch`` counted."""
        self._latest = max(self._latest, epoch)
        return self._latest


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one node, on each of its ``hosts``: the machines of its ranks. ranks: on each of several."""

    cpus: int
    gpus: int
    hosts: int = 1
    ranks: int = 1


class RayCluster:
    """Nodes of one ``fleet``: named, detached actors, each in a placement group of the same name."""

    def __init__(self, address: str, fleet: str) -> None:
        """Connect. ``address``: ``auto``, ``HOST:PORT`` of a cluster that this machine belongs to, or
        ``ray://HOST:PORT``. Raises ``ProviderFailed``.
        """
        global _users
        self._fleet = fleet
        self._fence = f"{fleet}-fence"  # no node: those have their names in the fleet
        self._actors: dict[str, Any] = {}  # handles, also of actors that are gone
        with _users_lock:
            try:
                ray.init(
                    address,
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    configure_logging=False,
                    ignore_reinit_error=True,
                )
            except (OSError, RuntimeError, ValueError) as error:
                raise ProviderFailed(f"there is no Ray cluster at {address}: {error}") from error
            _users += 1

    def close(self) -> None:
        """Let go of the connection; the actors stay. Call once."""
        global _users
        with _users_lock:
            _users -= 1
            if not _users:
                ray.shutdown()

    def machines(self) -> Sequence[str]:
        """Addresses of the machines that are alive."""
        return sorted({str(one["NodeManagerAddress"]) for one in ray.nodes() if one["Alive"]})

    def has_gpus(self) -> bool:
        return bool(ray.cluster_resources().get("GPU"))

    def check(self, fence: int) -> None:
        """Raise ``PlannerOutdated`` for a planner of an older epoch than has asked before. 0: no planner."""
        if not fence:
            return
        options = {"lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1}
        actor = ray.remote(RayFence).options(name=self._fence, namespace=_NAMESPACE, **options).remote()
        latest = ray.get(actor.latest.remote(fence), timeout=_ANSWER_S)
        if latest > fence:
            raise PlannerOutdated(
                f"a planner of epoch {fence} asks, and one of epoch {latest} has asked before: nothing was "
                "changed",
                latest,
            )

    def start(
        self, node_id: str, resources: Resources, role: str, toml: str, options: Sequence[str], drain_s: float
    ) -> None:
        """Ask for a node, see ``RayNode``; it starts as soon as machines have room."""
        bundle = {"CPU": resources.cpus, **({"GPU": resources.gpus} if resources.gpus else {})}
        hosts = resources.hosts
        group = placement_group(
            [bundle] * hosts,
            strategy="STRICT_PACK" if hosts == 1 else "STRICT_SPREAD",
            name=self._named(node_id),
            lifetime="detached",
        )

        def placed(actor: type, name: str, index: int) -> Any:
            return ray.remote(actor).options(
                name=name,
                namespace=_NAMESPACE,
                lifetime="detached",
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=_MAX_RESTARTS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            )

        try:
            node = placed(RayNode, self._named(node_id), 0)
            self._actors[node_id] = node.remote(node_id, role, toml, options, drain_s, hosts)
            for index in range(1, hosts):
                name = f"{node_id}-{index}"
                host = placed(RayRankHost, f"{self._fleet}-ranks/{name}", index)
                of_machine = (index - 1) * resources.ranks, resources.ranks, (hosts - 1) * resources.ranks
                host.remote(self._named(node_id), _NAMESPACE, name, toml, *of_machine)
        except BaseException:
            remove_placement_group(group)
            raise

    def stop(self, node_id: str) -> None:
        """Have the node drain. One that does not run, or does not answer, is ended at once."""
        actor = self._actor(node_id)
        if actor is None:
            return
        try:
            ray.get(actor.stop.remote(), timeout=_ANSWER_S)
        except (RayActorError, GetTimeoutError):
            self.end(node_id)

    def end(self, *node_ids: str) -> None:
        """Kill the actors, if they live, and give their resources back. Idempotent.

        Ray kills those of a node's other machines with their placement group.
        """
        for node_id in node_ids:
            actor = self._actor(node_id)
            if actor is not None:
                ray.kill(actor, no_restart=True)
            self._actors.pop(node_id, None)
        for group, name, _ in self._groups():
            if name in node_ids:
                remove_placement_group(group)

    def listed(self) -> Mapping[str, tuple[str, str, str]]:
        """Return role, state and reason of each node, by its id; role is empty where it is not known."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        ours = (self._node_of(one["name"]) for one in actors if one["namespace"] == _NAMESPACE)
        names = {one for one in ours if one}
        calls = {}
        for name in sorted(names | self._actors.keys()):
            if (actor := self._actor(name)) is not None:
                calls[actor.status.remote()] = name
        groups = {name: state for _, name, state in self._groups()}
        found: dict[str, tuple[str, str, str]] = {}
        done, late = ray.wait([*calls], num_returns=len(calls), timeout=_LIST_S) if calls else ([], [])
        for call in late:
            state = groups.get(calls[call], "")
            why = (
                "Ray has no room for it yet" if state in ("PENDING", "RESCHEDULING") else "it does not answer"
            )
            found[calls[call]] = ("", STARTING, why)
        for call in done:
            try:
                found[calls[call]] = ray.get(call)
            except RayActorError as error:
                found[calls[call]] = _dead(error, groups.get(calls[call], ""))
        return found

    def end_all(self) -> None:
        """End all nodes of this fleet."""
        self.end(*{name for _, name, _ in self._groups()}, *self._actors)
        with suppress(ValueError):  # no planner has asked
            ray.kill(ray.get_actor(self._fence, namespace=_NAMESPACE), no_restart=True)

    def _actor(self, node_id: str) -> Any:
        if node_id not in self._actors:
            try:
                self._actors[node_id] = ray.get_actor(self._named(node_id), namespace=_NAMESPACE)
            except ValueError:
                return None
        return self._actors[node_id]

    def _named(self, node_id: str) -> str:
        return f"{self._fleet}/{node_id}"

    def _node_of(self, name: str | None) -> str:
        """The node that an actor or a group of that name is of; empty: another fleet's."""
        fleet, _, node_id = (name or "").partition("/")
        return node_id if fleet == self._fleet else ""

    def _groups(self) -> list[tuple[PlacementGroup, str, str]]:
        """Each placement group that is there, the node it is of, and its state."""
        table: Mapping[str, Mapping[str, str]] = ray.util.placement_group_table()
        return [
            (ray.util.get_placement_group(one["name"]), node_id, one["state"])
            for one in table.values()
            if (node_id := self._node_of(one["name"])) and one["state"] != "REMOVED"
        ]


def is_here(address: str) -> bool:
    """Whether ``address`` is one of this machine."""
    addresses = (one for all_of in psutil.net_if_addrs().values() for one in all_of)
    return address in {one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)}


def _dead(error: RayActorError, group: str) -> tuple[str, str, str]:
    text = str(error).replace("\n", " ")
    if isinstance(error, ActorUnavailableError):
        room = "Ray has no room for it" if group in ("PENDING", "RESCHEDULING") else "Ray starts it again"
        return "", STARTING, room
    if "ray.kill" in text:  # another process of this fleet ended it
        return "", ENDED, ""
    return "", FAILED, f"is given up by Ray: {text[:400]}"
