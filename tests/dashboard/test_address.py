"""The page's state is in its address, Back undoes steps, and keys do what links do."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Browser, expect

from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import NEEDS_BROWSER, ask, show, signed_in

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]


async def test_an_address_opens_what_it_was_taken_from(browser: Browser, cluster: LocalCluster) -> None:
    wanted = await ask(cluster.url, "The one that is looked for.")
    other = await ask(cluster.url, "Another one.")
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    await signed_in(page, cluster.url)
    await show(page, "Requests")
    await page.get_by_label("Search requests").fill(wanted)
    rows = page.locator("#requests .rows tbody tr")
    await expect(rows).to_have_count(1)
    await page.get_by_label("Status").select_option("done")
    await page.get_by_label("Last").select_option("60")
    await rows.get_by_role("link").click()
    await expect(page.get_by_role("heading", name=wanted)).to_be_visible()
    await page.get_by_role("button", name="pause").click()
    # Another page of the same session, with nothing but the address.
    twin = await context.new_page()
    await twin.goto(page.url)
    await expect(twin.get_by_role("heading", name=wanted)).to_be_visible()
    await expect(twin.locator("#timeline .parts")).to_be_visible()
    await expect(twin.get_by_label("Search requests")).to_have_value(wanted)
    await expect(twin.get_by_label("Status")).to_have_value("done")
    await expect(twin.get_by_label("Last")).to_have_value("60")
    await expect(twin.get_by_role("button", name="pause")).to_have_attribute("aria-pressed", "true")
    await expect(twin.locator("#requests .rows tbody tr")).to_have_count(1)
    await twin.get_by_label("Search requests").fill("")
    await expect(twin.locator("#requests .rows tbody tr", has_text=other)).to_be_visible()
    await twin.close()
    # Back closes the request, and then the view; the filter is no step of its own.
    await page.go_back()
    await expect(page.locator("#timeline")).not_to_be_visible()
    await expect(rows).to_have_count(1)
    await page.go_back()
    await expect(page.get_by_role("heading", name="Cluster", exact=True)).to_be_visible()
    await context.close()


@pytest.mark.parametrize("view", ["%", "%E0%A4%A", "constructor", "no-such-view", "Fleet"])
async def test_an_address_without_a_view_opens_the_first(
    browser: Browser, cluster: LocalCluster, view: str
) -> None:
    page = await browser.new_page()
    await signed_in(page, cluster.url)
    await page.goto(f"{cluster.url}/#/{view}")
    await page.reload()
    await expect(page.get_by_role("heading", name="Cluster", exact=True, level=2)).to_be_visible()
    await expect(page.locator("#state")).to_have_text("ready")
    await page.close()


async def test_only_the_view_in_sight_is_on_the_page(browser: Browser, cluster: LocalCluster) -> None:
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    await signed_in(page, cluster.url)
    await expect(page.locator("#map svg .node").first).to_be_visible()
    for number, view in enumerate(("Cluster", "Cache", "Transfers", "Requests", "Latency", "Fleet"), start=1):
        await page.keyboard.press(str(number))
        await expect(page.get_by_role("heading", name=view, exact=True, level=2)).to_be_visible()
        assert await page.locator(".view").count() == 1
        # Charts of a view that was left are gone with it.
        assert await page.locator(".uplot:not(.view *)").count() == 0
    await page.close()


async def test_keys_search_pause_and_help(browser: Browser, cluster: LocalCluster) -> None:
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    await signed_in(page, cluster.url)
    await expect(page.locator("#state")).to_have_text("ready")
    pause = page.get_by_role("button", name="pause")
    await page.keyboard.press("Space")
    await expect(pause).to_have_attribute("aria-pressed", "true")
    await page.keyboard.press("Space")
    await expect(pause).to_have_attribute("aria-pressed", "false")
    # From a view without a search, the requests.
    await page.keyboard.press("/")
    search = page.get_by_label("Search requests")
    await expect(search).to_be_focused()
    await page.keyboard.type("3 nodes?")
    await expect(search).to_have_value("3 nodes?")
    await expect(page.locator("#requests .none")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    views = await page.locator("nav [data-view]").count()
    await expect(page.locator("#keys dt").first).to_have_text(f"1 … {views}")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("dialog")).not_to_be_visible()
    await page.close()


async def test_pairs_are_chosen_in_the_matrix_and_in_the_list(
    browser: Browser, cluster: LocalCluster
) -> None:
    await ask(cluster.url, "Blocks that move from one node to another, more than a single one. " * 4)
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    await signed_in(page, cluster.url)
    await show(page, "Transfers")
    row = page.locator("#routes tbody tr").first
    await row.click()
    await expect(row).to_have_attribute("aria-current", "true")
    pair = await row.get_attribute("data-key")
    assert pair is not None
    await expect(page.locator("#matrix .readout")).to_contain_text(pair)
    for measure in ("rate", "latency", "failures"):
        await page.get_by_label("Pairs by").select_option(measure)
        await expect(page).to_have_url(re.compile(f"by={measure}"))
    await page.get_by_label("Filter by node").fill("no-such-node")
    await expect(page.locator("#matrix .none")).to_have_text("No pair has a node of this name.")
    await page.close()
