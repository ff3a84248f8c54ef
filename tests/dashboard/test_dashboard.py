"""The dashboard in a real browser, against a real cluster: what it shows is what the conductor says."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, Route, expect

from moonpool.conductor.dashboard.routes import pause_s
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.observing.metrics_server import metrics_headers
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import another, eventually, kill, started
from tests.dashboard.conftest import BREAKOUT, MARKUP, NEEDS_BROWSER, SCREENSHOTS, ask, show, signed_in
from tests.processes import stop

VIEWS = ("Cluster", "Cache", "Transfers", "Requests", "Latency", "Fleet", "Usage", "Benchmarks", "Playground")
pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]


def percent(share: float) -> str:
    """As the page writes it: a half is rounded up."""
    return f"{Decimal(100 * share).quantize(Decimal('0.1'), ROUND_HALF_UP)} %"


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
    await expect(page.locator("[data-figure=hits] b")).to_have_text(percent(hit / queried))
    await show(page, "Cache")
    tenant = page.locator("#tenants tbody tr")
    await expect(tenant).to_have_count(1)
    await expect(tenant).to_contain_text(MARKUP)
    await expect(tenant).to_contain_text(f"{queried:,.0f}")
    await expect(tenant).to_contain_text(percent(hit / queried))
    await show(page, "Latency")
    count = await metric(cluster.url, "moonpool_time_to_first_token_seconds_count")
    await expect(page.locator("section", has=page.locator("#ttft"))).to_contain_text(f"of {count:.0f}")
    good = await metric(cluster.url, "moonpool_requests_within_slo_total")
    await expect(page.locator("#goodput")).to_contain_text(f"{good:.0f} of {good:.0f} sequences")
    await show(page, "Transfers")
    moved = page.locator("#routes tbody tr", has_text="prefill-0")
    await expect(moved.first).to_contain_text("decode-")


async def test_a_hit_that_ends_early_tells_where_it_was_and_what_it_missed(
    page: Page, cluster: LocalCluster
) -> None:
    start = "A beginning that all of these prompts have in common, longer than a block. " * 3
    await show(page, "Requests")
    rows = page.locator("#requests tbody tr", has_text=re.compile("hit, rest never seen, .*from"))

    async def is_shown() -> bool:
        # What was computed is found once it is published.
        await ask(cluster.url, start + f"{time.monotonic_ns()} other words" * 8)
        return await rows.count() > 0

    await eventually(is_shown)
    await show(page, "Cache")
    await expect(page.locator("#outcomes")).to_contain_text("hit, rest never seen")


async def test_transfers_are_those_of_the_nodes_metrics(page: Page, cluster: LocalCluster) -> None:
    await ask(cluster.url, "Sixteen tokens make a block, and a block is moved. " * 4)
    async with cluster.client() as client:
        members = (await client.cluster())["nodes"]
    # Each replica counts what it reads itself.
    each = [one for node in members for one in node.get("replicas") or [node]]
    pages = [str(one["metrics_url"]).removesuffix("/metrics") for one in each]
    key = metrics_headers(Security(cluster.config.security, Caller("operator", "a test"), serves=False))

    async def count_of(path: str) -> float:
        name = rf'moonpool_transfer_batch_seconds_count{{direction="read",path="{path}"}}'
        return sum([await metric(url, re.escape(name), key) for url in pages])

    counts: dict[str, float] = {}

    async def is_counted() -> bool:
        # A batch may be counted after its request has ended.
        counts.update({path: await count_of(path) for path in ("shm", "tcp")})
        return any(counts.values())

    await eventually(is_counted)
    path = max(counts, key=lambda one: counts[one])
    await show(page, "Transfers")
    row = page.locator("#paths tbody tr", has_text=path)

    async def is_shown() -> bool:
        return await row.locator("td").nth(3).text_content() == f"{await count_of(path):.0f}"

    await eventually(is_shown)
    for place in (8, 9, 10):  # nothing under way, nothing failed
        await expect(row.locator("td").nth(place)).to_have_text("0")


async def test_what_another_cache_would_have_found_is_told(page: Page, cluster: LocalCluster) -> None:
    for _ in range(2):
        await ask(cluster.url, "A prompt that comes again is found where there is room for it. " * 3)
    await show(page, "Cache")
    await expect(page.locator("#reuse > div").last).to_contain_text("%")
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    ratios = dict(now["reuse"]["hit_ratios"])
    best = max(ratios.values())
    assert best > 0
    # The page ends where a larger cache would find hardly more.
    last = next(ratio for ratio in ratios.values() if ratio >= best - 1e-3)
    await expect(page.locator("#reuse > div").last).to_contain_text(percent(last))
    await expect(page.locator("#reuse + p")).to_contain_text("As large as the prefill nodes' pools")


async def test_benchmark_results_are_drawn(page: Page, cluster: LocalCluster) -> None:
    await show(page, "Benchmarks")
    await expect(page.locator("#benchmarks .list li").first).to_contain_text("hostile.json")
    first = page.locator("#benchmarks .benchmark")
    await expect(first.locator("tbody tr")).to_have_count(2)
    await expect(first.locator("figcaption")).to_have_text(f"{MARKUP}{BREAKOUT}")
    await expect(first).to_contain_text("1 of 1 limits reached")


async def test_a_benchmark_result_that_could_not_be_read_is_read_again(
    page: Page, cluster: LocalCluster
) -> None:
    await page.route("**/v1/benchmarks/*", lambda route: route.abort())
    await show(page, "Benchmarks")
    figures = page.locator("#benchmarks .benchmark")
    await expect(figures.locator(".bad")).to_be_visible()
    await page.unroute("**/v1/benchmarks/*")
    await page.locator("#benchmarks .list").get_by_role("link", name="hostile.json").click()
    await expect(figures.locator("figcaption")).to_have_text(f"{MARKUP}{BREAKOUT}")


async def test_a_paused_page_tells_that_the_conductor_answers_again(
    page: Page, cluster: LocalCluster
) -> None:
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    is_first, answers = True, asyncio.Event()

    async def answer(route: Route) -> None:
        nonlocal is_first
        if is_first:  # the stream ends after a snapshot
            is_first = False
            await route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(now)}\n\n")
        else:
            await answers.wait()
            await route.continue_()

    await page.get_by_role("button", name="pause").click()
    await page.route("**/v1/live", answer)
    await page.reload()
    state = page.locator("#state")
    await expect(state).to_have_text("the conductor does not answer")
    answers.set()
    await expect(state).to_have_text("ready")


async def test_of_several_models_the_page_tells_whose_figures_it_shows(
    page: Page, cluster: LocalCluster
) -> None:
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    now["cluster"]["models"] = [{"name": name, "num_nodes": 1, "num_requests": 0} for name in "abc"]
    told = """async (now) => {
        const { take } = await import('/static/dashboard.js');
        take({ ...now, unix_s: 4e9 });
        return document.getElementById('model').textContent; }"""
    assert await page.evaluate(told, now) == f"figures of {MARKUP}, nodes of all 3 models"


async def test_a_page_can_be_paused(page: Page, cluster: LocalCluster) -> None:
    await show(page, "Requests")
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
    await show(page, "Requests")
    row = page.locator("#requests tbody tr", has_text=request)
    await expect(row).to_contain_text("done")
    await row.get_by_role("link").click()
    panel = page.locator("#timeline")
    await expect(panel.locator("h3")).to_have_text(request)
    await expect(panel.locator(".why")).to_have_text(timeline["summary"]["detail"])
    await expect(panel.locator(".longest")).to_have_text(timeline["explanation"])
    assert await panel.locator(".parts tbody tr").count() == len(timeline["parts"])
    names = await panel.locator("ol b").all_text_contents()
    assert names == [event["event"].replace("_", " ") for event in timeline["events"]]
    spans = panel.locator(".spans .track i")
    assert await spans.count() == len(timeline["spans"])
    assert await spans.and_(page.locator(".moment")).count() == sum(
        not span["seconds"] for span in timeline["spans"]
    )
    await panel.locator(".candidates summary").click()
    await expect(panel.locator("table tr", has_text="chosen").first).to_contain_text("prefill-0")
    await page.keyboard.press("Escape")
    await expect(panel).not_to_be_visible()


async def test_a_timeline_that_could_not_be_read_is_read_again(page: Page, cluster: LocalCluster) -> None:
    request = await ask(cluster.url, "A request whose timeline is asked for in a bad moment.")
    await page.route("**/v1/requests/*/timeline", lambda route: route.abort())
    await show(page, "Requests")
    await page.locator("#requests tbody tr", has_text=request).get_by_role("link").click()
    await expect(page.locator("#timeline .bad")).to_be_visible()
    await page.unroute("**/v1/requests/*/timeline")
    await expect(page.locator("#timeline .longest")).to_be_visible()


async def test_requests_end_on_the_page_though_many_newer_ones_follow(
    page: Page, cluster: LocalCluster
) -> None:
    wanted = await ask(cluster.url, "One that the page saw run.", max_tokens=1)
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    (seen,) = [one for one in now["requests"] if one["id"] == wanted]
    # As many as no snapshot has.
    for _ in range(41):
        await ask(cluster.url, "A newer one.", max_tokens=1)
    await show(page, "Requests")
    take = """async ([now, records]) => {
        const { take } = await import('/static/dashboard.js');
        take({ ...now, requests: records.map((one) => ({ ...one, status: 'running' })) }); }"""
    # The conductor that served the other one is gone, or has forgotten it.
    await page.evaluate(take, [now, [seen, {**seen, "id": "cmpl-forgotten"}]])
    await page.get_by_label("Search requests").fill(wanted)
    await expect(page.locator("#requests .rows tbody tr")).to_contain_text("done")
    await page.get_by_label("Search requests").fill("cmpl-forgotten")
    await expect(page.locator("#requests .none")).to_be_visible()


async def test_the_playground_answers_and_says_what_is_wrong(page: Page, cluster: LocalCluster) -> None:
    await show(page, "Playground")
    form, output = page.locator("#playground form"), page.locator("#playground output")
    await form.locator("textarea").fill(f"{MARKUP} The end")
    await form.get_by_role("button", name="Send").click()
    await expect(output).to_contain_text("is not for API keys of the role read")
    await form.locator("#api-key").fill("sk-1")
    await form.get_by_role("button", name="Send").click()
    await page.locator("#playground").get_by_role("link", name="Timeline").click()
    await expect(page.locator("#timeline ol")).to_contain_text("first token")


async def test_usage_says_what_tenants_took_and_nodes_did(page: Page, cluster: LocalCluster) -> None:
    await ask(cluster.url, "In the beginning God created the heaven and the earth. ")
    await show(page, "Usage")
    tenants, nodes = (
        page.locator(f"#usage [aria-label='{rows} by day'] tbody tr") for rows in ("Tenants", "Nodes")
    )
    # Conductors write what they know every two seconds, nodes tell it with their heartbeats.
    await expect(tenants.first).to_contain_text(re.compile(r"\d{4}-\d\d-\d\d"))
    await expect(nodes.first).to_contain_text(re.compile(r"[1-9][\d.]* %"))


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)])
async def test_every_view_fits_its_screen(page: Page, cluster: LocalCluster, theme: str, width: int) -> None:
    for _ in range(3):
        await ask(cluster.url, "Two kinds of outcomes: a prompt that is new, and the same again. " * 4)
    await page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    await page.set_viewport_size({"width": width, "height": 900})
    await expect(page.locator("#map svg .node")).to_have_count(4)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for view in VIEWS:
        await show(page, view)
        # Its name is in sight.
        named = page.get_by_role("navigation").get_by_role("link", name=view, exact=True)
        assert await named.evaluate("(one) => one.getBoundingClientRect().right <= innerWidth"), view
        if view == "Cluster":
            await expect(page.locator("#events li").first).to_be_visible()
            assert await page.locator("#events ol").evaluate("(one) => one.clientHeight") > 40
        if view == "Cache":
            await expect(page.locator("#outcomes .track").nth(1)).to_be_visible()
        # Bars that are compared begin and end alike.
        tracks = """[...document.querySelectorAll('.bars')].map((box) =>
            new Set([...box.querySelectorAll('.track')].map((one) => one.clientWidth)).size)"""
        assert max(await page.evaluate(tracks), default=0) <= 1, view
        # Nothing is wider than the page, but for what scrolls in itself.
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        if width == 1440:
            fits = "(box) => box.scrollHeight <= box.clientHeight && box.scrollWidth <= box.clientWidth"
            assert await page.evaluate(
                f"[document.documentElement, document.querySelector('main')].every({fits})"
            )
            # Nor is anything cut off at the right that cannot be scrolled to, whatever was estimated so far.
            if view == "Latency":
                await expect(page.locator("#scatter figure").first).to_be_visible()
            cut = """() => {
                const box = document.querySelector('#scatter');
                while (box && box.children.length < 6) box.append(box.lastChild.cloneNode(true));
                return [...document.querySelectorAll('.view *')]
                    .filter((one) => !one.closest('.scroll, svg, .plot'))
                    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
                    .map((one) => one.outerHTML.slice(0, 100));
            }"""
            assert await page.evaluate(cut) == [], view
        await page.screenshot(path=SCREENSHOTS / f"{view.lower()}-{theme}-{width}.png", full_page=width < 900)


async def test_a_page_left_open_does_not_grow(page: Page, cluster: LocalCluster) -> None:
    """An hour's worth of snapshots at once, twice: the second time nothing is kept that was not before."""
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    await page.get_by_role("button", name="pause").click()
    fill = """async ([now, from]) => {
        const { take } = await import('/static/dashboard.js');
        for (let i = 0; i < 4000; i++) take({ ...now, unix_s: 4e9 + from + i });
        return (await import('/static/history.js')).kept(); }"""
    assert await page.evaluate(fill, [now, 0]) == await page.evaluate(fill, [now, 5000]) == 3600


async def test_replicas_are_drawn_inside_their_node(page: Page, cluster: LocalCluster) -> None:
    node = page.locator("#map svg .replicas[data-node=prefill-0]")
    await expect(node).to_have_class(re.compile("good"))
    await show(page, "Fleet")
    await expect(page.locator("#nodes tr", has_text="prefill-0").locator("th.replica")).to_have_text(
        ["prefill-0.0", "prefill-0.1"]
    )
    await show(page, "Cluster")
    async with cluster.client() as client:
        (first,) = [one for one in (await client.cluster())["nodes"] if one["node_id"] == "prefill-0"]
    # The node would start the replica again before the page shows that it is gone.
    stop(cluster.children["prefill-0"].pid)
    try:
        os.kill(first["replicas"][1]["pid"], signal.SIGKILL)
        await expect(node).to_have_class(re.compile("warn"), timeout=120_000)
        await expect(node).to_contain_text("1 of 2 serve")
        # The node lacks a replica; it is not a node that is gone.
        await show(page, "Fleet")
        await expect(page.locator("#nodes tbody tr", has_text="prefill-0.1").locator(".bad")).to_have_count(
            0, timeout=120_000
        )
    finally:
        os.kill(cluster.children["prefill-0"].pid, signal.SIGCONT)
    await show(page, "Cluster")
    await expect(node).to_have_class(re.compile("good"), timeout=120_000)


async def test_nodes_that_serve_both_stages_are_drawn_and_found(page: Page, cluster: LocalCluster) -> None:
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    now["reuse"]["hit_ratios"] = [[16, 0.25], [64, 0.5]]
    for node in now["cluster"]["nodes"]:
        for one in (node, *node["replicas"]):
            one["role"] = "both"
    # The cluster's own snapshots, of its prefill and decode nodes, would come in between.
    await page.get_by_role("button", name="pause").click()
    draw = """async (now) => {
        const { arrived } = await import('/static/frames.js');
        const { fromTemplate } = await import('/static/elements.js');
        const frame = arrived({ ...now, unix_s: 4e9 });
        const told = {};
        for (const name of ['cluster', 'cache', 'fleet']) {
            document.querySelector('main .view')?.remove();
            const root = document.createElement('div');
            root.className = 'view';
            root.append(fromTemplate(`view-${name}`, true));
            document.querySelector('main').append(root);
            const { mount } = await import(`/static/views/${name}.js`);
            const param = (key) => (key === 'role' ? 'both' : '');
            const page = { live: true, param, range: () => 60, with: () => '#', change() {} };
            mount(root, page).draw(frame);
            if (name === 'cluster') told.drawn = root.querySelectorAll('#map svg .node').length;
            if (name === 'cache') told.reuse = root.querySelector('#reuse + p').textContent;
            if (name === 'fleet') told.role = root.querySelector('#role').value;
        }
        return told;
    }"""
    told = await page.evaluate(draw, now)
    assert told["drawn"] == sum(len(node["replicas"]) or 1 for node in now["cluster"]["nodes"])
    assert "As large as the prefill nodes' pools" in told["reuse"]
    assert told["role"] == "both"


async def test_regions_are_a_column_once_a_node_has_one(page: Page, cluster: LocalCluster) -> None:
    await show(page, "Fleet")
    await expect(page.locator("#nodes thead th")).to_have_count(10)
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    draw = """async ([now, places]) => {
        const { take } = await import('/static/dashboard.js');
        for (const node of now.cluster.nodes) [node.region, node.zone] = places[node.role];
        take({ ...now, unix_s: 4e9 });
        const rows = [...document.querySelectorAll('#nodes tbody tr[data-key]')];
        const title = document.querySelector('#nodes thead th:last-child').textContent;
        return [title, rows.map((row) => row.cells[10]?.textContent).sort()];
    }"""
    places = {"prefill": ["eu", "a"], "decode": ["", ""]}
    title, cells = await page.evaluate(draw, [now, places])
    assert title == "region" and cells == ["", "", "", "", "eu/a"]  # decode nodes and replicas


async def test_the_plan_with_its_reasons_and_the_requests_that_move(
    page: Page, cluster: LocalCluster
) -> None:
    await show(page, "Fleet")
    await expect(page.locator("#moves")).to_be_hidden()
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    draw = """async ([now, planner, moves]) => {
        const { take } = await import('/static/dashboard.js');
        now.cluster.migrations = moves;
        take({ ...now, planner, unix_s: 4e9 });
        const texts = (found) => [...document.querySelectorAll(found)].map((one) => one.textContent);
        const cells = (id) => texts(`#${id} tbody :is(td, th)`);
        return [texts('#planner')[0], cells('plan'), document.querySelector('#moves').hidden, cells('moves')];
    }"""
    role = {"ready": 1, "starting": 0, "needed": 2, "target": 3, "attained": 0.5, "why": "", "join": {}}
    role |= {"reason": f"2 needed {MARKUP}", "held": "none is asked for within 9 s"}
    planner = {"mode": "advise", "state": "plans, epoch 4", "roles": {"prefill": role}}
    planner["steps"] = [{"kind": "add", "role": "prefill", "node_id": ""}]
    move = {"request_id": MARKUP, "source": "decode-0", "target": "decode-1", "cause": "drain"}
    move["reason"] = "decode-0 hands its requests on"
    assert await page.evaluate(draw, [now, planner, [move]]) == [
        "plans, epoch 4; mode advise; would add a prefill node",
        ["prefill", "1", "0", "2", "3", "50.0 %", f"{role['reason']}; {role['held']}"],
        False,
        [*move.values()],
    ]
    assert (await page.evaluate(draw, [now, planner, []]))[2:] == [True, []]


async def test_a_day_of_other_nodes_and_requests_leaves_no_trace(page: Page, cluster: LocalCluster) -> None:
    """Snapshots in which everything has a new name each second: the page has as many elements as before."""
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    draw = """async ([now, from]) => {
        const { take } = await import('/static/dashboard.js');
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
            take(one);
        }
        return document.querySelectorAll('*').length;
    }"""
    for number, view in enumerate(VIEWS[:6]):
        await show(page, view)
        first = await page.evaluate(draw, [now, 1000 * number])
        assert abs(await page.evaluate(draw, [now, 1000 * number + 100]) - first) <= 20, view


async def test_rates_of_a_large_cluster_are_those_between_its_snapshots(
    page: Page, cluster: LocalCluster
) -> None:
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    # What the slowest snapshots take comes on top of the time between them.
    spent_s = 0.1
    rate = """async ([now, after_s]) => {
        const { take } = await import('/static/dashboard.js');
        const { over } = await import('/static/history.js');
        const output_tokens = now.metrics.output_tokens + 100 * after_s;
        take({ ...now, unix_s: 4e9 });
        take({ ...now, unix_s: 4e9 + after_s, metrics: { ...now.metrics, output_tokens } });
        return over(60, 4e9 + after_s, ['generated'])[1].at(-1); }"""
    seen = await page.evaluate(rate, [now, pause_s(spent_s) + spent_s])
    assert seen == pytest.approx(100)


async def test_totals_of_another_conductor_are_no_rates(page: Page, cluster: LocalCluster) -> None:
    """The connection breaks, and the next one leads to another conductor, or to one that began anew."""
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    other = copy.deepcopy(now)
    other["unix_s"] = now["unix_s"] + 2.0
    other["metrics"]["output_tokens"] += 1e9
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        for bucket in other["metrics"][name]["buckets"]:
            bucket[1] += 1000
    bodies = [f"data: {json.dumps(one)}\n\n" for one in (now, other)]

    async def answer(route: Route) -> None:
        if bodies:
            await route.fulfill(content_type="text/event-stream", body=bodies.pop(0))
        else:
            await route.abort()

    await page.route("**/v1/live", answer)
    await page.reload()
    over = """async (until) => {
        const { over } = await import('/static/history.js');
        return over(60, until, ['generated', 'ttft-0.5']); }"""
    seen: list[Any] = []

    async def both_came() -> bool:
        seen[:] = await page.evaluate(over, other["unix_s"])
        return len(seen[0]) == 2

    await eventually(both_came)
    assert seen[1:] == [[0, 0], [None, None]]


async def test_a_killed_node_is_seen_to_go(page: Page, cluster: LocalCluster) -> None:
    node = page.locator("#map svg [data-node=decode-1]")
    await expect(node).to_have_class(re.compile("good"))
    kill(cluster, "decode-1")
    await expect(node).to_have_class(re.compile("bad"), timeout=120_000)
    await expect(page.locator("#events li", has_text="decode-1").first).to_contain_text(
        "left", timeout=120_000
    )
    await show(page, "Fleet")
    await expect(page.locator("#nodes tr", has_text="decode-1").locator(".bad")).to_be_visible()


async def test_names_with_markup_are_text(page: Page, cluster: LocalCluster) -> None:
    """A node of another's making: it registers as any does, with a name of its own choice."""
    async with started(another(cluster, "marked-up", "decode", f"node.id={MARKUP}")):
        async with cluster.client() as client:

            async def joined() -> bool:
                return any(node["node_id"] == MARKUP for node in (await client.cluster())["nodes"])

            await eventually(joined)
        await show(page, "Fleet")
        await expect(page.locator("#nodes tbody tr", has_text=MARKUP)).to_be_visible()
        await show(page, "Cluster")
        box = page.locator("#map svg .node", has=page.locator("title", has_text=MARKUP))
        # Cut to what fits into its box: the whole name is in its title, and in the table.
        await expect(box.locator("text.name")).to_have_text(f"{MARKUP[:28]}…")
