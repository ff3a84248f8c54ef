"""Each view of a made-up cluster at 1440 × 900, against a reference of where its panels are.

The reference is structural, ``screens.json``: the box of every panel, rounded to 8 px. Pixels would differ
with the fonts and anti-aliasing of each machine, and a picture does not say which panel has moved. After a
change that is meant, run this with ``MOONPOOL_WRITE_SCREENS=1``, and look at the pictures in
build/screenshots.
"""

from __future__ import annotations

import json
import os
from contextlib import aclosing
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from moonpool.bench.conductor.frames import TAKE
from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import NEEDS_BROWSER, SCREENSHOTS, ask, show, signed_in
from tests.dashboard.made_up import large
from tests.dashboard.test_dashboard import VIEWS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]

REFERENCE = Path(__file__).with_name("screens.json")
WRITES = "MOONPOOL_WRITE_SCREENS"
ROUND_PX, TOLERANCE_PX = 8, 16  # two lines of another font; panels are hundreds of pixels wide
# Name and box of each panel in sight.
BOXES = """(unit) => {
    const found = {};
    for (const panel of document.querySelectorAll('.view :is(section, figure, form, aside, .bar, #now)')) {
        // What is inside of these depends on the figures.
        if (!panel.checkVisibility() || panel.parentElement.closest('aside, .scroll, #scatter')) continue;
        const own = panel.ariaLabel ?? panel.querySelector('figcaption, h2, h3')?.firstChild.textContent;
        const box = panel.getBoundingClientRect();
        const name = `${panel.localName} ${panel.id || own || panel.className}`;
        found[name] = [box.x, box.y, box.width, box.height].map((px) => unit * Math.round(px / unit));
    }
    return found;
}"""
# Texts that end at an edge in the middle of a word: neither shortened with an ellipsis nor to be scrolled.
CLIPPED = """() => {
    const found = [], range = document.createRange();
    const apart = 'svg, option, noscript, script, style, textarea';
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].find((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || element.closest(apart) || !element.checkVisibility()) continue;
        range.selectNodeContents(element);
        const text = range.getBoundingClientRect(), told = own.textContent.trim();
        if (text.right <= 0 || text.bottom <= 0) continue;  // the link for keyboards, until it has the focus
        const beyond = ({ left, right }) => text.left < left - 1 || text.right > right + 1;
        let free = false;
        for (let at = element; at && !free; at = at.parentElement) {
            const { textOverflow, overflowX } = getComputedStyle(at), edge = at.getBoundingClientRect();
            free = textOverflow === 'ellipsis' || ['auto', 'scroll'].includes(overflowX) || edge.width <= 1;
            if (!free && overflowX !== 'visible' && beyond(edge)) found.push(`${told} in ${at.localName}`);
        }
        if (!free && beyond({ left: 0, right: innerWidth })) found.push(`${told} beyond the page`);
    }
    return found;
}"""

# As of /v1/usage: what the session's cluster has differs with the tests before.
_WASTED = {"retried": 1234.5, "rejected": 61.27, "cancelled": 12.43, "speculation": 3.321}
_SPENT = {
    "day": "2026-11-25",
    "model": "a-model-with-a-long-name",
    "cost": 1234.5,
    "tokens_per_unit": 123456.7,
}
USAGE = {
    "data": [
        _SPENT
        | {"tenant": tenant, "requests": 12345, "prompt_tokens": 123456789, "output_tokens": 12345678}
        | {"seconds": {"useful": 12345.6, "wasted": _WASTED}}
        for tenant in ("acme", "a-tenant-with-a-long-name")
    ],
    "nodes": [
        _SPENT
        | {"seconds": {"wall": 98765.4, "useful": 54321.0, "wasted": _WASTED, "idle": 43132.9}}
        | {"joules": {"gpus": 123456.7, "processors": "not measured"}}
    ],
}
# What views ask for by themselves, and show when it has come.
ASKED = {"Usage": "#usage tbody tr", "Benchmarks": "#benchmarks tbody tr"}
# Lists that one would have to scroll to the side.
SIDEWAYS = """() => [...document.querySelectorAll('.view .scroll')]
    .filter((box) => box.checkVisibility() && box.scrollWidth > box.clientWidth + 1)
    .map((box) => `${box.ariaLabel}: ${box.scrollWidth} of ${box.clientWidth}`)"""


async def test_the_panels_of_every_view_are_where_the_reference_has_them(
    browser: Browser, cluster: LocalCluster
) -> None:
    await ask(cluster.url, "A request, for the lists to show.")
    async with cluster.client() as client, aclosing(client.live()) as live:
        now = await anext(live)
    page = await browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    await page.route("**/v1/live", lambda route: route.abort())  # the cluster's own would come in between
    await page.route("**/v1/usage?*", lambda route: route.fulfill(json=USAGE))
    await signed_in(page, cluster.url)
    await page.evaluate("(texts) => { window.snapshots = texts }", [json.dumps(large(now, 64, 3))])
    seen = {}
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for number, view in enumerate(VIEWS):
        await show(page, view)
        if view in ASKED:
            await expect(page.locator(ASKED[view]).first).to_be_visible()
        await page.evaluate(TAKE, number)
        await page.screenshot(path=SCREENSHOTS / f"screen-{view.lower()}.png")
        assert await page.evaluate(CLIPPED) == [], view
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
        assert await page.evaluate(SIDEWAYS) == [], view
        seen[view] = await page.evaluate(BOXES, ROUND_PX)
    await page.close()
    if os.environ.get(WRITES):
        lines = [
            f"  {json.dumps(view)}: {{\n"
            + ",\n".join(f"    {json.dumps(name)}: {json.dumps(box)}" for name, box in boxes.items())
            + "\n  }"
            for view, boxes in seen.items()
        ]
        REFERENCE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    wanted = json.loads(REFERENCE.read_text())
    assert {view: list(boxes) for view, boxes in seen.items()} == {
        view: list(boxes) for view, boxes in wanted.items()
    }
    moved = {
        f"{view}: {name}": (box, seen[view][name])
        for view, boxes in wanted.items()
        for name, box in boxes.items()
        if any(abs(a - b) > TOLERANCE_PX for a, b in zip(box, seen[view][name], strict=True))
    }
    assert not moved, moved
