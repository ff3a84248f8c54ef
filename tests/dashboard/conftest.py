"""One cluster and one browser for all tests of pages: names in it are somebody's attempt to run a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright, expect

from moonpool.bench.conductor.frames import CHROMIUM
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import small_config

NEEDS_BROWSER = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt install chromium; CI has it"
)
# Pages ask a cluster that may have little of the machine for a while.
expect.set_options(timeout=60_000)
# Kept, so that somebody can look at them: CI's artefacts.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
MARKUP = "<img src=x onerror='window.pwned=1'>"
SECRET = "a-secret-that-nobody-is-shown"
BREAKOUT = "</script><script>window.pwned=1</script><!--"
TENANTS = f"""
read_keys = ["sk-watch"]
["{MARKUP}"]
keys = ["sk-1"]
[other]
keys = ["sk-2"]
read_keys = ["sk-page"]
"""


def result(path: Path, text: str) -> Path:
    """A benchmark's file with somebody's text wherever text may stand."""
    row = {"case": text, "metric": text, "value": 8.0, "unit": text, "p50": 8.0, "p99": 9.0}
    peer = {"peer": text, "peer_value": 4.0, "ratio": 2.0, "limit": "at least", "limit_value": 1.5}
    environment = {"machine": text, "versions": {text: text}, "commit": text}
    environment["date"] = "2026-11-21T03:00:00+00:00"
    path.write_text(json.dumps({"environment": environment, "rows": [row, {**row, **peer}]}))
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("dashboard")
    (directory / "tenants.toml").write_text(TENANTS)
    (directory / "results").mkdir()
    result(directory / "results" / "hostile.json", f"{MARKUP}{BREAKOUT}")
    config = small_config()
    config = replace(
        config,
        model=replace(config.model, name=MARKUP),
        cluster=replace(config.cluster, prefill=1, decode=2, prefill_options=("engine.parallel.dp=2",)),
        conductor=replace(
            config.conductor,
            tenants_path=str(directory / "tenants.toml"),
            results_path=str(directory / "results"),
            slo_ttft_s=60.0,
        ),
        security=replace(config.security, cluster_key=SECRET),
    )
    async with LocalCluster(config, directory=directory) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=120_000
        )
        yield opened
        await opened.close()


async def signed_in(page: Page, url: str, key: str = "sk-watch") -> None:
    """Open the dashboard as a person does who has only its address and a key."""
    page.set_default_timeout(60_000)  # of loads and clicks, for the same reason
    await page.goto(url)
    await expect(page).to_have_url(f"{url}/sign-in")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page).to_have_url(f"{url}/")


async def show(page: Page, view: str) -> None:
    """Open a view, as its link does."""
    await page.get_by_role("navigation").get_by_role("link", name=view, exact=True).click()
    await expect(page.get_by_role("heading", name=view, exact=True, level=2)).to_be_visible()


async def ask(url: str, prompt: str, max_tokens: int = 8, key: str = "sk-1") -> str:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": max_tokens, "user": MARKUP, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        return str((await answer.json())["id"])
