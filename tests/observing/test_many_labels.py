"""A million names in requests: pages, snapshots and the cost of a count stay as small as with a thousand."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moonpool.conductor.observing.activity import Activity
from moonpool.conductor.observing.request_metrics import MOST_TENANTS, RequestMetrics
from tests.observing.test_failures import counted

NAMES = 1_000_000
COUNT_S = 50e-6  # the most that counting a request may take; a request takes milliseconds
SNAPSHOT_S = 0.05  # the most that its tenants add to a snapshot


@pytest.mark.slow
def test_a_million_tenants_have_a_thousand_series() -> None:
    registry = CollectorRegistry()
    metrics, activity = RequestMetrics("m", registry), Activity(time.time)
    began_s = time.thread_time()
    for number in range(NAMES):
        metrics.of_tenant(f"tenant-{number}", "done", {"prompt": 2})
        activity.prompt(f"tenant-{number}", {"computed": 1 + (number == 7)})
    each_s = (time.thread_time() - began_s) / NAMES
    began_s = time.thread_time()
    page = generate_latest(registry).decode()
    page_s = time.thread_time() - began_s
    began_s = time.thread_time()
    shown = activity.to_dict()["tenants"]
    shown_s = time.thread_time() - began_s
    print(
        f"{1e6 * each_s:.1f} µs a request; /metrics {len(page):,} bytes in {1e3 * page_s:.0f} ms; "
        f"tenants of a snapshot in {1e3 * shown_s:.0f} ms"
    )
    assert each_s < COUNT_S
    lines = [line for line in page.splitlines() if line.startswith("moonpool_tenant_requests_total{")]
    assert len(lines) == MOST_TENANTS + 1
    # Nothing is lost: later names count as one.
    assert sum(float(line.split()[-1]) for line in lines) == NAMES
    assert shown_s < SNAPSHOT_S
    assert len(shown) == 101
    assert sum(one["prompt"] for one in shown.values()) == NAMES + 1


async def test_what_clients_make_up_adds_no_series(api: Any) -> None:
    """Paths, methods, models, request ids and users of their own choice."""

    async def series(number: int) -> int:
        for name in (f"a-{number}", f"b-{number}"):
            async with api.client.request("PROPFIND", f"{api.url}/{name}") as answer:
                assert answer.status in (404, 405)
            headers = {"x-request-id": name}
            for model in (name, None):
                body = {"prompt": name, "max_tokens": 1, "user": name} | ({"model": model} if model else {})
                url = f"{api.url}/v1/completions?of={name}"
                async with api.client.post(url, json=body, headers=headers) as answer:
                    assert answer.status == (404 if model else 200), await answer.text()
        async with api.client.get(f"{api.url}/metrics") as answer:
            return len((await answer.text()).splitlines())

    await series(0)  # what is counted of the scrape itself is on the next page
    first, failures = await series(1), len(counted())
    assert {await series(number) for number in range(2, 20)} == {first}
    assert len(counted()) == failures
