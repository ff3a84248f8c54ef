"""The dashboard of 64 and 1,024 nodes: it stays fluid, and has few elements."""

from __future__ import annotations

import json
from contextlib import aclosing
from statistics import median

import pytest
from playwright.async_api import Browser, expect

from moonpool.bench.conductor.frames import TAKE, busy_s
from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import NEEDS_BROWSER, SCREENSHOTS, ask, show, signed_in
from tests.dashboard.made_up import large

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER, pytest.mark.slow]

# What a snapshot may take on a machine that lays out a table of 5,000 cells in so much time.
FRAME_MS, TABLE_MS = 50, 90.0
SECONDS = 6
VIEWS = ("Cluster", "Cache", "Transfers", "Requests", "Latency", "Fleet")
# Lay out a table that is made anew.
TABLE = """() => {
    const table = document.createElement('table');
    for (let row = 0; row < 1000; row += 1) {
        const made = table.insertRow();
        for (let cell = 0; cell < 5; cell += 1) made.insertCell().textContent = `${row} of ${cell}`;
    }
    document.body.append(table);
    const { height } = table.getBoundingClientRect();
    table.remove();
    return height;
}"""


@pytest.mark.alone  # it measures time
@pytest.mark.parametrize("num_nodes", [64, 1024])
async def test_a_large_cluster_is_fluid(browser: Browser, cluster: LocalCluster, num_nodes: int) -> None:
    await ask(cluster.url, "A request, for the lists to show.")
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    # The cluster's own snapshots would come in between.
    await page.route("**/v1/live", lambda route: route.abort())
    await signed_in(page, cluster.url)
    texts = [json.dumps(large(now, num_nodes, second)) for second in range(4)]
    # They are there before: what hands them over costs the page, and is the test's.
    await page.evaluate("(texts) => { window.snapshots = texts }", texts)
    frames_ms, tables_ms = {}, {}
    for number, view in enumerate(VIEWS):
        await page.evaluate(TAKE, number * SECONDS)
        await show(page, view)
        some = await busy_s(page, TAKE, 3 * [*range(number * SECONDS + 1, (number + 1) * SECONDS)])
        frames_ms[view] = tuple(round(1000 * each, 1) for each in (min(some), median(some), max(some)))
        tables_ms[view] = round(1000 * min(await busy_s(page, TABLE, range(3))), 1)
        # As many as are in sight, not as there are nodes.
        assert await page.evaluate("document.querySelectorAll('.view *').length") < 2000, view
        fits = "document.querySelector('main').scrollHeight <= document.querySelector('main').clientHeight"
        assert await page.evaluate(fits), view
        await page.screenshot(path=SCREENSHOTS / f"{view.lower()}-{num_nodes}-nodes.png")
    print(f"{num_nodes} nodes, ms of the main thread a snapshot, least, median and most: {frames_ms}")
    print(f"a table of 5,000 cells after each: {tables_ms}")
    # Machines differ, and each from moment to moment. The least of them: what else runs slows the others.
    for view, (least, _, _) in frames_ms.items():
        assert least <= FRAME_MS * max(tables_ms[view] / TABLE_MS, 1.0), (view, frames_ms, tables_ms)
    told = "Canary of large: next with 10 %, 1.5 % of 200 failed, before 0.5 % of 1,800 failed: wait"
    await expect(page.locator("#canaries")).to_have_text(told)
    rows = page.locator("#models tbody tr")
    lent = ["large", str(num_nodes // 2), "0", "3", "yes", "1,235", "lend decode-1 to large: it queues"]
    assert await rows.nth(0).locator("th, td").all_text_contents() == lent
    assert (await rows.nth(1).locator("th, td").all_text_contents())[:5] == [
        *("next", str(num_nodes // 2), "2", "3", "no")
    ]
    # The last of a thousand nodes is found, by scrolling and by name.
    await page.locator("#nodes .scroll").evaluate("(box) => { box.scrollTop = box.scrollHeight }")
    last = f"prefill-{num_nodes // 2 - 1}"
    await expect(page.locator("#nodes tbody tr", has_text=last)).to_be_visible()
    await page.locator("#nodes .scroll").evaluate("(box) => { box.scrollTop = 0 }")
    await page.keyboard.press("/")
    await page.keyboard.type("decode-31")
    await expect(page.locator("#nodes tbody:not(.space) tr").first).to_contain_text("decode-31")
    await page.close()
