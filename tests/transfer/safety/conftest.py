"""An agent that serves; its region must be unchanged at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.transfer.safety.served import NBYTES, Served, start


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with await start("server") as server, await start("client") as client:
        region = server.allocate(NBYTES, "region")
        server.allow_writes(region)
        region.array[:] = np.random.default_rng(5).integers(0, 256, NBYTES, np.uint8)
        before = region.array.copy()
        yield await Served(server, region, client).measured()
        assert np.array_equal(region.array, before), "the region was written"
