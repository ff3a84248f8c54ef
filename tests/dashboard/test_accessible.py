"""The pages without a mouse and without sight: axe-core's rules, and the keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, expect

from moonpool.commands.run_report import benchmark_facts, cluster_facts, report_data
from moonpool.commands.single_page import single_page
from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import NEEDS_BROWSER, ask, result, show, signed_in

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]


async def violations(page: Page) -> list[str]:
    found = (await Axe().run(page)).response["violations"]
    return [f"{one['id']}: {node['html'][:160]}" for one in found for node in one["nodes"]]


async def test_the_sign_in_keeps_the_rules(browser: Browser, cluster: LocalCluster) -> None:
    page = await browser.new_page(bypass_csp=True)  # for the checker, which is put into the page
    await page.goto(cluster.url)
    await expect(page.get_by_label("API key")).to_be_focused()
    await page.keyboard.type("sk-9")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_have_text("This API key is unknown.")
    assert await violations(page) == []
    await page.close()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_dashboard_keeps_the_rules(browser: Browser, cluster: LocalCluster, theme: str) -> None:
    request = await ask(cluster.url, "A request to look at. " * 8)
    page = await browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
    await signed_in(page, cluster.url)
    for view in ("Cluster", "Cache", "Transfers", "Latency", "Fleet", "Usage", "Benchmarks", "Playground"):
        await show(page, view)
        if view == "Benchmarks":
            await expect(page.locator("#benchmarks tbody tr").first).to_be_visible()
        assert await violations(page) == [], view
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    assert await violations(page) == []
    await page.keyboard.press("Escape")
    await page.goto(f"{cluster.url}/#/fleet?node=prefill-0")
    await expect(page.get_by_role("heading", name="prefill-0")).to_be_visible()
    assert await violations(page) == []
    await show(page, "Requests")
    row = page.locator("#requests tbody tr", has_text=request)
    await expect(row).to_contain_text("done")
    assert await violations(page) == []
    # The timeline by keyboard alone: open, read, close, and be where one was.
    await row.get_by_role("link").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name=request)).to_be_focused()
    await page.locator("#timeline .candidates summary").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#timeline .candidates table").first).to_be_visible()
    assert await violations(page) == []
    await page.keyboard.press("Escape")
    focused = "document.activeElement.closest('tr')?.dataset.key"
    assert await page.evaluate(focused) == request
    # Snapshots go on under whoever is on a row, and do not take the focus away.
    await ask(cluster.url, "Another one.")
    await expect(page.locator("#requests tbody tr").first).not_to_contain_text(request)
    assert await page.evaluate(focused) == request
    await page.close()


@pytest.mark.slow
async def test_a_report_keeps_the_rules(browser: Browser, cluster: LocalCluster, tmp_path: Path) -> None:
    async with cluster.client() as client:
        facts = await cluster_facts(client, seconds=1, num_requests=2)
    benchmarks = benchmark_facts([result(tmp_path / "one.json", "a case")])
    file = tmp_path / "report.html"
    file.write_text(single_page("A report", report_data("A report", facts, benchmarks)))
    page = await browser.new_page()
    await page.goto(file.as_uri())
    # The checker is put into the page, which its policy forbids: into a copy without one.
    text = file.read_text().replace("Content-Security-Policy", "x-policy-of-the-original")
    (tmp_path / "open.html").write_text(text)
    await page.goto((tmp_path / "open.html").as_uri())
    await expect(page.locator("#benchmarks tbody tr")).to_have_count(2)
    assert await violations(page) == []
    await page.close()
