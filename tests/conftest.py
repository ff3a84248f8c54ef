"""What every test shares."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from hypothesis import settings

# Cores are shared and kernels compile on first use: a slow example is no failure. The test's own limit holds.
settings.register_profile("moonpool", deadline=None)
settings.load_profile("moonpool")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run ``async def`` tests also without pytest-asyncio: `make gpu` does with what is installed."""
    test, has_plugin = pyfuncitem.obj, pyfuncitem.config.pluginmanager.hasplugin("asyncio")
    if has_plugin or not inspect.iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU: `make gpu`, on a machine that has one")
