"""The stand-in for the CUDA runtime, for every test here."""

from __future__ import annotations

import pytest

from tests.transfer.device import use_stand_in


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return use_stand_in(monkeypatch)
