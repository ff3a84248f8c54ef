"""Seconds of a dashboard page's main thread for each snapshot, in Chromium. Other processes do not count."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Page

VIEWS = ("cluster", "cache", "transfers", "requests", "latency", "fleet")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--no-sandbox", "--disable-gpu")

# Take in one of ``window.snapshots`` as if it came from the conductor, and wait until it is painted.
TAKE = """async (second) => {
    const { take } = await import('/static/dashboard.js');
    const now = JSON.parse(snapshots[second % snapshots.length]);
    now.unix_s = 4e9 + second;
    take(now);
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
}"""


class BrowserMissing(Exception):
    """There is no Chromium on PATH, or Playwright is not installed."""


async def busy_s(page: Page, script: str, numbers: Iterable[int]) -> list[float]:
    """Seconds of the page's main thread for each call of ``script`` with a number."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def thread_s() -> float:
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    found = []
    for number in numbers:
        before_s = await thread_s()
        await page.evaluate(script, number)
        found.append(await thread_s() - before_s)
    await session.detach()
    return found


async def frame_times(url: str, snapshots: Sequence[str], count: int) -> dict[str, list[float]]:
    """Seconds of ``count`` snapshots of each view, at 1440 × 900. Raises ``BrowserMissing``.

    ``snapshots`` are shown in turn, as fast as the page takes them, in place of the conductor's own.
    """
    try:
        from playwright.async_api import async_playwright
    except ModuleNotFoundError:
        raise BrowserMissing("Playwright is not installed: pip install 'moonpool[dev]'") from None
    if CHROMIUM is None:
        raise BrowserMissing("there is no browser: apt install chromium")
    found = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_OPTIONS)
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        await page.route("**/v1/live", lambda route: route.abort())
        await page.goto(url)
        await page.evaluate("(texts) => { window.snapshots = texts }", list(snapshots))
        await page.evaluate(TAKE, 0)
        for number, view in enumerate(VIEWS):
            await page.evaluate("(view) => { location.hash = `#/${view}` }", view)
            await page.locator(f"h2:text-is('{view.title()}')").wait_for()
            # The first one fills the view.
            first = 1 + number * (count + 1)
            found[view] = (await busy_s(page, TAKE, range(first, first + count + 1)))[1:]
        await browser.close()
    return found
