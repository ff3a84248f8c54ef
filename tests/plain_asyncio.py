"""``async def`` tests and fixtures where pytest-asyncio is not installed: `make gpu` does with what there is.

A test and its fixtures run on one event loop. Fixtures of a wider scope than a test are not async here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest

_LOOP = pytest.StashKey[asyncio.Runner]()


def _loop_of(item: pytest.Item) -> asyncio.Runner:
    if _LOOP not in item.stash:
        item.stash[_LOOP] = asyncio.Runner()
    return item.stash[_LOOP]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _loop_of(pyfuncitem).run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    function = fixturedef.func
    if not (inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)):
        return None
    assert fixturedef.scope == "function", (
        f"{fixturedef.argname}: only fixtures of one test can be async here"
    )
    loop = _loop_of(request.node)
    made = function(**{name: request.getfixturevalue(name) for name in fixturedef.argnames})
    if inspect.iscoroutine(made):
        value = loop.run(made)
    else:
        value = loop.run(anext(made))
        fixturedef.addfinalizer(lambda: loop.run(_finish(made)))
    fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
    return value


async def _finish(made: AsyncIterator[Any]) -> None:
    try:
        await anext(made)
    except StopAsyncIteration:
        return
    raise AssertionError("an async fixture yields once")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    """After the fixtures: what tasks are left end with the loop."""
    try:
        return (yield)
    finally:
        if _LOOP in item.stash:
            item.stash[_LOOP].close()
