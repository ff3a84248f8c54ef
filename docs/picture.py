"""Take the picture of the dashboard for the README: ``make picture`` writes docs/dashboard.png.

Starts a cluster on this machine, holds conversations with it, and photographs its dashboard in Chromium.
``make picture ARGS=DIR`` also writes every view to DIR/VIEW-WIDTH.png, for a desk's screen and a phone's.
Needs the development packages and a Chromium on PATH.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from playwright.async_api import Page, async_playwright, expect

from moonpool.client import Client, Message, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.loading import load_config

TARGET = Path(__file__).parent / "dashboard.png"
SYSTEM = "You are a very small model that has read two old books. Answer in a sentence or two. "
QUESTIONS = ("Who was Solomon?", "Tell me about Moses.", "What is a cynic?", "Go on.")
NUM_CONVERSATIONS = 16
VIEWS = ("cluster", "cache", "transfers", "requests", "latency", "fleet", "usage", "benchmarks", "playground")
SIZES = ((1440, 900), (390, 844))


async def converse(client: Client, number: int) -> None:
    """Hold one conversation of four turns; all share a system message, so they share its blocks."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM * 4}]
    for question in QUESTIONS[number % 2 :] + QUESTIONS[: number % 2]:
        messages.append({"role": "user", "content": question})
        reply = Reply()
        async for _ in client.chat(messages, reply, max_tokens=64, temperature=0.7, seed=number):
            pass
        messages.append({"role": "assistant", "content": reply.text})


async def photograph(page: Page, directory: Path) -> None:
    """Every view, filled: two snapshots later."""
    directory.mkdir(parents=True, exist_ok=True)
    for width, height in SIZES:
        await page.set_viewport_size({"width": width, "height": height})
        for view in VIEWS:
            await page.evaluate("(view) => { location.hash = `#/${view}?range=60` }", view)
            await page.wait_for_timeout(2500)
            await page.screenshot(path=directory / f"{view}-{width}.png", full_page=width < height)


async def main() -> None:
    config = load_config(None, ["conductor.port=0"])
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    async with LocalCluster(config) as cluster, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
        await page.goto(f"{cluster.url}/#/cluster?range=60")
        await expect(page.locator("#state")).to_have_text("ready")
        async with Client(cluster.url) as client:
            await converse(client, 0)
            await asyncio.gather(*(converse(client, number) for number in range(1, NUM_CONVERSATIONS // 2)))
            rest = asyncio.gather(
                *(converse(client, number) for number in range(NUM_CONVERSATIONS // 2, NUM_CONVERSATIONS))
            )
            # At work: blocks move, and tokens come.
            await expect(page.locator("[data-figure=tokens] b")).not_to_have_text("0")
            await expect(page.locator("#map .rate").first).to_be_visible()
            await page.screenshot(path=TARGET)
            if len(sys.argv) > 1:
                await photograph(page, Path(sys.argv[1]))
            await rest
        await browser.close()
    print(f"{TARGET}: {TARGET.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    asyncio.run(main())
