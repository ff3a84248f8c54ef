"""Every error has a class of failure, every class has an error, and what is counted has bounded labels."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import LifeEnded, MoonpoolError, RemoteError, failure_of
from moonpool.runtime.failures import CAUSES, FailureClass, cause_of_status
from moonpool.runtime.observing import failures
from tests.test_layers import source_files


class Classes:
    """The classes of a code base by module and name, read without importing it."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._bases: dict[str, dict[str, list[str]]] = {}  # by name, then module
        self._own: dict[tuple[str, str], str] = {}  # the failure that a class itself states
        for module, text in sources.items():
            if "class " not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base) for base in node.bases]
                    self._bases.setdefault(node.name, {})[module] = bases
                    for line in node.body:
                        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "failure":
                            self._own[module, node.name] = ast.unparse(line.value)

    def errors(self) -> list[tuple[str, str]]:
        """(module, name) of all errors of ours."""
        found, new = {"MoonpoolError"}, {"MoonpoolError"}
        while (
            new := {name for name, of in self._bases.items() for bases in of.values() if new & set(bases)}
            - found
        ):
            found |= new
        return [
            (module, name)
            for name in found - {"MoonpoolError"}
            for module, bases in self._bases[name].items()
            if found & set(bases)
        ]

    def failures(self, module: str, name: str) -> set[str]:
        """What the class or its branch states; the root's default does not count. Empty where one of several
        bases of that name states nothing."""
        if own := self._own.get((module, name)):
            return {own}
        stated: set[str] = set()
        for base in self._bases[name][module]:
            homes = self._bases.get(base, {})
            if base != "MoonpoolError" and homes:
                each = [self.failures(home, base) for home in ([module] if module in homes else homes)]
                stated |= set().union(*each) if all(each) else set()
        return stated


def test_every_error_has_a_class_and_every_class_an_error() -> None:
    classes = Classes({module: file.read_text() for module, file in source_files().items()})
    errors = classes.errors()
    assert len(errors) > 100
    assert [error for error in errors if not classes.failures(*error)] == []
    stated = set[str]().union(*(classes.failures(*error) for error in errors))
    assert stated == {f"FailureClass.{each.name}" for each in FailureClass}


def test_an_error_without_a_class_is_found() -> None:
    branch = "class Branch(MoonpoolError):\n    failure = FailureClass.STORE\n"
    named = branch + "class Named(Branch):\n    pass\n"
    classes = Classes({"a": named, "b": "class New(MoonpoolError):\n    pass\nclass Below(New):\n    pass\n"})
    assert sorted(classes.errors()) == [("a", "Branch"), ("a", "Named"), ("b", "Below"), ("b", "New")]
    assert classes.failures("a", "Named") == {"FailureClass.STORE"}
    assert classes.failures("b", "New") == classes.failures("b", "Below") == set()


def tree(root: type[MoonpoolError] = MoonpoolError) -> Iterator[type[MoonpoolError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from tree(kind)


def test_causes_are_words_of_one_list() -> None:
    statuses = {code for kind in tree() for code in [kind.code]} | {"CANCELLED", "", "nonsense"}
    assert {cause_of_status(status) for status in statuses} <= CAUSES


def test_an_error_that_stands_for_another_has_its_class() -> None:
    assert failure_of(LifeEnded("rank 1 is lost")) is FailureClass.GROUP
    assert failure_of(LifeEnded("the device is lost", FailureClass.DEVICE)) is FailureClass.DEVICE
    assert failure_of(TimeoutError()) is failure_of(asyncio.CancelledError()) is FailureClass.REQUEST
    assert failure_of(ZeroDivisionError()) is FailureClass.WORKER
    assert FailureClass.of_wire("store") is FailureClass.STORE
    assert FailureClass.of_wire("of a later version") is FailureClass.of_wire("") is FailureClass.NODE


def counted() -> dict[tuple[str, str], float]:
    family = next(each for each in REGISTRY.collect() if each.name == "moonpool_failures")
    return {
        (sample.labels["class"], sample.labels["cause"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_whatever_is_counted_labels_are_bounded() -> None:
    before = counted()
    for number in range(200):
        failures.count(FailureClass.STORE, f"of its own {number}")
        failures.count_error(RemoteError("n", f"Kind{number}", f"STATUS{number}", "text"))
    failures.count_error(asyncio.CancelledError())
    after = counted()
    assert after["store", "error"] - before.get(("store", "error"), 0) == 200
    assert after["node", "error"] - before.get(("node", "error"), 0) == 200
    assert sum(after.values()) - sum(before.values()) == 400
    assert all(FailureClass(failure) and cause in CAUSES for failure, cause in after)


class Raises(node_pb2_grpc.NodeServicer):
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def Release(self, request: Any, context: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("failure", FailureClass)
async def test_the_class_crosses_a_call(failure: FailureClass) -> None:
    node = Raises(LifeEnded("it ended", failure))
    server, port = await rpc.serve([(node_pb2_grpc.add_NodeServicer_to_server, node)], "127.0.0.1", 0)
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with pytest.raises(RemoteError) as caught, rpc.node_errors("n"):
            await stub.Release(node_pb2.ReleaseRequest())
    await server.stop(None)
    assert failure_of(caught.value) is failure
