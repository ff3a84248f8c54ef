"""`moonpool report`: one file that says what the cluster says, runs nothing else and asks nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from moonpool.commands.run_report import benchmark_facts, report_data
from moonpool.commands.single_page import bundle, single_page
from moonpool.errors import ReportSourceInvalid
from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import (
    BREAKOUT,
    MARKUP,
    NEEDS_BROWSER,
    SCREENSHOTS,
    SECRET,
    ask,
    result,
)
from tests.forked_command import forked_command

RESULTS = Path(__file__).parents[2] / "bench" / "results"


async def opened(browser: Browser, file: Path) -> tuple[Page, list[str]]:
    """The file in a browser, and what it asked for or complained of."""
    complaints: list[str] = []
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("request", lambda request: complaints.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    await page.goto(file.as_uri())
    return page, complaints


@NEEDS_BROWSER
@pytest.mark.asyncio(loop_scope="session")
async def test_a_report_of_a_cluster_runs_nothing_and_asks_nobody(
    browser: Browser, cluster: LocalCluster, tmp_path: Path
) -> None:
    prompt = f"{MARKUP} a prompt that is nobody's business"
    request = await ask(cluster.url, prompt)
    file = tmp_path / "report.html"
    arguments = [
        "--url",
        cluster.url,
        "--api-key",
        "sk-watch",
        "--seconds",
        "1",
        "--title",
        f"{MARKUP}{BREAKOUT}",
        "-o",
        str(file),
    ]
    results = [str(result(tmp_path / "hostile.json", f"{MARKUP}{BREAKOUT}"))]
    process = await asyncio.create_subprocess_exec(
        *(*forked_command("moonpool"), "report", *arguments, *results), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    text = file.read_text()
    assert SECRET not in text
    assert "nobody's business" not in text
    page, complaints = await opened(browser, file)
    await expect(page.locator("h1")).to_have_text(f"{MARKUP}{BREAKOUT}")
    await expect(page.locator("#model")).to_have_text(MARKUP)
    await expect(page.locator("#tenants tbody tr")).to_contain_text(MARKUP)
    await expect(page.locator("#benchmarks tbody")).to_contain_text(f"{MARKUP}{BREAKOUT}")
    await expect(page.locator("#options")).to_contain_text("security.cluster_key")
    async with cluster.client() as client:
        timeline = await client.timeline(request)
    drawn = page.locator("#timelines article", has_text=request)
    names = await drawn.locator("ol b").all_text_contents()
    assert names == [event["event"].replace("_", " ") for event in timeline["events"]]
    assert await page.locator("[data-only=live]").count() == 0
    assert await page.evaluate("window.pwned") is None
    assert complaints == [file.as_uri()]
    # Whatever came in by another way than the file's own scripts would be stopped, too.
    blocked = """() => new Promise((seen) => {
        document.addEventListener("securitypolicyviolation", (event) => seen(event.violatedDirective));
        const script = document.createElement("script"); script.textContent = "window.pwned = 1";
        document.body.append(script); })"""
    assert "script-src" in await page.evaluate(blocked)
    assert await page.evaluate("window.pwned") is None
    await page.close()


@pytest.mark.slow
@NEEDS_BROWSER
@pytest.mark.asyncio(loop_scope="session")
async def test_every_result_of_the_repository_is_drawn(browser: Browser, tmp_path: Path) -> None:
    files = sorted(RESULTS.glob("*.json"))
    benchmarks = benchmark_facts(files)
    file = tmp_path / "report.html"
    file.write_text(single_page("Results", report_data("Results", None, benchmarks)))
    page, complaints = await opened(browser, file)
    assert complaints == [file.as_uri()]
    await expect(page.locator("#benchmarks article")).to_have_count(len(files))
    for one in benchmarks:
        measured = {(row["case"], row["metric"]) for row in one["report"]["rows"]}
        peers = sum("peer" in row for row in one["report"]["rows"])
        heading = page.get_by_role("heading", name=one["name"], exact=True)
        article = page.locator("#benchmarks article", has=heading)
        assert await article.locator("tbody tr").count() == len(measured) + peers
        await expect(article.locator(".conditions")).to_contain_text(one["report"]["environment"]["machine"])
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        await page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        await page.screenshot(path=SCREENSHOTS / f"report-{theme}.png")
    # Paper is light, and nothing on it can be clicked.
    await page.emulate_media(media="print")
    await expect(page.locator("#theme")).not_to_be_visible()
    await page.close()


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"rows": []}')
    with pytest.raises(ReportSourceInvalid, match=r"other\.json is no report of .*environment is missing"):
        benchmark_facts([file])


def test_a_bundle_keeps_modules_apart() -> None:
    script = bundle("report.js")
    assert script.count('modules["elements.js"] =') == 1
    assert script.index('modules["elements.js"] =') < script.index('modules["charts/plot.js"] =')
    assert 'modules["../elements.js"]' not in script
    assert "export " not in script
    assert "import " not in script
