"""The dashboard in a real browser, against a real cluster: what it shows is what the conductor says."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.observing.metrics_server import metrics_headers
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import another, eventually, kill, started
from tests.dashboard.conftest import BREAKOUT, MARKUP, NEEDS_BROWSER, SCREENSHOTS, ask, signed_in
from tests.processes import stop

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: Browser, cluster: LocalCluster) -> AsyncIterator[Page]:
    """The dashboard; the test fails on any error of its scripts."""
    errors: list[str] = []
    opened = await browser.new_page(viewport={"width": 1280, "height": 900})
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    await signed_in(opened, cluster.url)
    await expect(opened.locator("#state")).to_have_text("ready")
    yield opened
    assert await opened.evaluate("window.pwned") is None
    await opened.close()
    # A request that is refused is told to the user, and by the browser to its console.
    assert [error for error in errors if not error.startswith("Failed to load resource")] == []


async def metric(url: str, name: str, headers: dict[str, str] | None = None) -> float:
    headers = headers or {"Authorization": "Bearer sk-watch"}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as answer:
        found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", await answer.text(), re.MULTILINE)
        return float(found[1]) if found else 0.0


async def test_the_figures_are_those_of_the_metrics(page: Page, cluster: LocalCluster) -> None:
    for _ in range(3):
        await ask(cluster.url, f"{MARKUP} In the beginning God created the heaven and the earth. " * 4)
    hit = await metric(cluster.url, "moonpool_prefix_hit_tokens_total")
    queried = await metric(cluster.url, "moonpool_prefix_queried_tokens_total")
    assert hit > 0
    await expect(page.locator("[data-figure=hits] b")).to_have_text(f"{100 * hit / queried:.1f} %")
    count = await metric(cluster.url, "moonpool_time_to_first_token_seconds_count")
    await expect(page.locator("#ttft + p")).to_contain_text(f"of {count:.0f}")
    tenant = page.locator("#tenants tbody tr")
    await expect(tenant).to_have_count(1)
    await expect(tenant).to_contain_text(MARKUP)
    await expect(tenant).to_contain_text(f"{queried:,.0f}")
    await expect(tenant).to_contain_text(f"{100 * hit / queried:.1f} %")
    good = await metric(cluster.url, "moonpool_requests_within_slo_total")
    await expect(page.locator("#goodput")).to_contain_text(f"{good:.0f} of {good:.0f} sequences")
    moved = page.locator("#routes tbody tr", has_text="prefill-0")
    await expect(moved.first).to_contain_text("decode-")


async def test_a_hit_that_ends_early_tells_where_it_was_and_what_it_missed(
    page: Page, cluster: LocalCluster
) -> None:
    start = "A beginning that all of these prompts have in common, longer than a block. " * 3
    rows = page.locator("#requests tbody tr", has_text=re.compile("hit, rest never seen, .*from"))

    async def is_shown() -> bool:
        # What was computed is found once it is published.
        await ask(cluster.url, start + f"{time.monotonic_ns()} other words" * 8)
        return await rows.count() > 0

    await eventually(is_shown)
    await expect(page.locator("#outcomes")).to_contain_text("hit, rest never seen")


async def test_transfers_are_those_of_the_nodes_metrics(page: Page, cluster: LocalCluster) -> None:
    await ask(cluster.url, "Sixteen tokens make a block, and a block is moved. " * 4)
    pages = [str(node.ready["metrics_url"]).removesuffix("/metrics") for node in cluster.nodes]
    key = metrics_headers(Security(cluster.config.security, Caller("operator", "a test"), serves=False))

    async def count_of(path: str) -> float:
        name = rf'moonpool_transfer_batch_seconds_count{{direction="read",path="{path}"}}'
        return sum([await metric(url, re.escape(name), key) for url in pages])

    counts = {path: await count_of(path) for path in ("shm", "tcp")}
    path = max(counts, key=lambda one: counts[one])
    assert counts[path] > 0
    row = page.locator("#paths tbody tr", has_text=path)

    async def is_shown() -> bool:
        # A batch may be counted after its request has ended.
        return await row.locator("td").nth(3).text_content() == f"{await count_of(path):.0f}"

    await eventually(is_shown)
    for place in (6, 7, 8):  # nothing under way, nothing failed
        await expect(row.locator("td").nth(place)).to_have_text("0")


async def test_what_another_cache_would_have_found_is_told(page: Page, cluster: LocalCluster) -> None:
    for _ in range(2):
        await ask(cluster.url, "A prompt that comes again is found where there is room for it. " * 3)
    await expect(page.locator("#reuse > div").last).to_contain_text("%")
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    ratios = dict(now["reuse"]["hit_ratios"])
    best = max(ratios.values())
    assert best > 0
    await expect(page.locator("#reuse > div").last).to_contain_text(f"{100 * best:.1f} %")
    await expect(page.locator("#reuse + p")).to_contain_text("As large as the prefill nodes' pools")


async def test_benchmark_results_are_drawn(page: Page, cluster: LocalCluster) -> None:
    first = page.locator("#benchmarks details").first
    await expect(first).to_contain_text("hostile.json")
    await expect(first.locator("tbody tr")).to_have_count(2)
    await expect(first.locator("figcaption")).to_have_text(f"{MARKUP}{BREAKOUT}")
    await expect(first.locator(".benchmark")).to_contain_text("1 of 1 limits reached")


async def test_a_page_can_be_paused(page: Page, cluster: LocalCluster) -> None:
    pause = page.get_by_role("button", name="pause")
    await pause.click()
    await expect(pause).to_have_attribute("aria-pressed", "true")
    request = await ask(cluster.url, "What comes while nobody looks.")
    async with cluster.client() as client, aclosing(client.live()) as live:
        # The page is sent what we are: by our third snapshot it has had two.
        for _ in range(3):
            now = await anext(live)
    assert any(one["id"] == request for one in now["requests"])
    await expect(page.locator("#requests tbody tr", has_text=request)).to_have_count(0)
    await pause.click()
    await expect(page.locator("#requests tbody tr", has_text=request)).to_have_count(1)


async def test_a_timeline_is_that_of_the_api(page: Page, cluster: LocalCluster) -> None:
    request = await ask(cluster.url, "And God said, Let there be light: and there was light.")
    async with cluster.client() as client:
        timeline = await client.timeline(request)
    row = page.locator("#requests tbody tr", has_text=request)
    await expect(row).to_contain_text("done")
    await row.get_by_role("button").click()
    dialog = page.locator("#timeline")
    await expect(dialog.locator("h2")).to_have_text(request)
    await expect(dialog.locator(".why")).to_have_text(timeline["summary"]["detail"])
    await expect(dialog.locator(".longest")).to_have_text(timeline["explanation"])
    assert await dialog.locator(".parts tbody tr").count() == len(timeline["parts"])
    names = await dialog.locator("ol b").all_text_contents()
    assert names == [event["event"].replace("_", " ") for event in timeline["events"]]
    assert await dialog.locator("svg rect").count() == sum(span["seconds"] > 0 for span in timeline["spans"])
    await dialog.locator(".candidates summary").click()
    await expect(dialog.locator("table tr", has_text="chosen").first).to_contain_text("prefill-0")
    await page.keyboard.press("Escape")
    await expect(dialog).not_to_be_visible()


async def test_the_playground_answers_and_says_what_is_wrong(page: Page, cluster: LocalCluster) -> None:
    form = page.locator("#playground form")
    await form.locator("textarea").fill(f"{MARKUP} The end")
    await form.get_by_role("button", name="Send").click()
    await expect(form.locator("output")).to_contain_text("is not for API keys of the role read")
    await form.locator("#api-key").fill("sk-1")
    await form.get_by_role("button", name="Send").click()
    await form.get_by_role("button", name="Timeline").click()
    await expect(page.locator("#timeline ol")).to_contain_text("first token")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("dark", 390)])
async def test_every_part_is_on_the_page(page: Page, theme: str, width: int) -> None:
    await page.emulate_media(color_scheme=theme)
    await page.set_viewport_size({"width": width, "height": 900})
    await expect(page.locator("#map svg .node")).to_have_count(4)
    # Nothing is wider than the page, but for what scrolls in itself.
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for heading in (
        "Cluster",
        "Cache",
        "Transfers",
        "Requests",
        "Service",
        "Events",
        "Benchmarks",
        "Playground",
    ):
        await expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=SCREENSHOTS / f"dashboard-{theme}-{width}.png", full_page=True)


async def test_a_page_left_open_does_not_grow(page: Page) -> None:
    """Ten minutes' worth of snapshots at once, twice: the second time nothing is kept that was not before."""
    await page.evaluate("import('/static/charts.js').then((m) => { window.charts = m })")
    fill = """(from) => {
        for (let i = 0; i < 1200; i++) charts.add(from + i, {'chart-tokens': [i, i], 'chart-requests': [i, i],
            'chart-goodput': [i, i, i], 'chart-hits': [i, i], 'chart-moved': [i]});
        return charts.kept(); }"""
    assert await page.evaluate(fill, 0) == await page.evaluate(fill, 5000) == 600


async def test_replicas_are_drawn_inside_their_node(page: Page, cluster: LocalCluster) -> None:
    node = page.locator("#map svg .replicas[data-node=prefill-0]")
    await expect(node).to_have_class(re.compile("good"))
    await expect(page.locator("#nodes tr", has_text="prefill-0").locator("td.replica")).to_have_text(
        ["prefill-0.0", "prefill-0.1"]
    )
    async with cluster.client() as client:
        (first,) = [one for one in (await client.cluster())["nodes"] if one["node_id"] == "prefill-0"]
    # The node would start the replica again before the page shows that it is gone.
    stop(cluster.children["prefill-0"].pid)
    try:
        os.kill(first["replicas"][1]["pid"], signal.SIGKILL)
        await expect(node).to_have_class(re.compile("warn"), timeout=60_000)
        await expect(node).to_contain_text("1 of 2 serve")
        # The node lacks a replica; it is not a node that is gone.
        await expect(page.locator("#nodes tbody tr", has_text="prefill-0.1").locator(".bad")).to_have_count(
            0, timeout=60_000
        )
    finally:
        os.kill(cluster.children["prefill-0"].pid, signal.SIGCONT)
    await expect(node).to_have_class(re.compile("good"), timeout=60_000)


async def test_a_day_of_other_nodes_and_requests_leaves_no_trace(page: Page, cluster: LocalCluster) -> None:
    """Snapshots in which everything has a new name each second: the page has as many elements as before."""
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    await page.get_by_role("button", name="pause").click()
    draw = """async ([now, from]) => {
        const { draw } = await import('/static/panels.js');
        const renamed = (text, second) => `${text}-${second}`;
        for (let second = from; second < from + 60; second++) {
            const one = structuredClone(now);
            one.unix_s = 4e9 + second;
            for (const node of one.cluster.nodes) node.node_id = renamed(node.node_id, second);
            for (const route of one.routes) {
                route.source = renamed(route.source, second);
                route.target = renamed(route.target, second);
            }
            for (const request of one.requests) request.id = renamed(request.id, second);
            for (const event of one.events) event.text = renamed(event.text, second);
            draw(one, (id) => document.createElement('span'));
        }
        return document.querySelectorAll('*').length;
    }"""
    first = await page.evaluate(draw, [now, 0])
    assert abs(await page.evaluate(draw, [now, 100]) - first) <= 20  # marks on the axes of the charts


async def test_a_killed_node_is_seen_to_go(page: Page, cluster: LocalCluster) -> None:
    node = page.locator("#map svg [data-node=decode-1]")
    await expect(node).to_have_class(re.compile("good"))
    kill(cluster, "decode-1")
    await expect(node).to_have_class(re.compile("bad"), timeout=60_000)
    await expect(page.locator("#nodes tr", has_text="decode-1").locator(".bad")).to_be_visible()
    await expect(page.locator("#events li", has_text="decode-1").first).to_contain_text(
        "left", timeout=60_000
    )


async def test_names_with_markup_are_text(page: Page, cluster: LocalCluster) -> None:
    """A node of another's making: it registers as any does, with a name of its own choice."""
    async with started(another(cluster, "marked-up", "decode", f"node.id={MARKUP}")):
        async with cluster.client() as client:

            async def joined() -> bool:
                return any(node["node_id"] == MARKUP for node in (await client.cluster())["nodes"])

            await eventually(joined)
        await expect(page.locator("#nodes tbody tr", has_text=MARKUP)).to_be_visible()
        box = page.locator("#map svg .node", has=page.locator("title", has_text=MARKUP))
        # Cut to what fits into its box: the whole name is in its title, and in the table.
        await expect(box.locator("text.name")).to_have_text(f"{MARKUP[:28]}…")
