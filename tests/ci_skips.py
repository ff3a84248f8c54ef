"""In CI (``CI=true``) a test that is skipped for want of a program fails: CI has all of them."""

from __future__ import annotations

import os
from typing import Any

import pytest

# What CI need not have: a GPU, data that is not in the repository, the repository's history, vLLM (3.4 GB),
# SGLang (1.5 GB), llama.cpp.
MAY_LACK = (
    *("NVIDIA GPU", "GPU here", "shared/data", "no history here"),
    *("no vLLM here", "no SGLang here", "no llama.cpp here"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2]
        if not any(words in reason for words in MAY_LACK):
            report.outcome = "failed"
            report.longrepr = f"CI lacks what this test needs: {reason}"
    return report
