"""Sign-in, sessions and their scope in a real browser."""

from __future__ import annotations

import pytest
from playwright.async_api import Browser, expect

from moonpool.local.cluster import LocalCluster
from tests.dashboard.conftest import MARKUP, NEEDS_BROWSER, ask, show, signed_in

pytestmark = [pytest.mark.asyncio(loop_scope="session"), NEEDS_BROWSER]


async def test_a_session_begins_with_a_key_and_ends_with_sign_out(
    browser: Browser, cluster: LocalCluster
) -> None:
    page = await browser.new_page()
    await page.goto(cluster.url)
    await page.get_by_label("API key").fill("sk-1")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_contain_text("role inference")
    await signed_in(page, cluster.url)
    await expect(page.locator("#state")).to_have_text("ready")
    (cookie,) = await page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert await page.evaluate("document.cookie") == "", "scripts cannot read it"
    assert (await page.request.get(f"{cluster.url}/metrics")).status == 200
    await page.get_by_role("button", name="sign out").click()
    await expect(page).to_have_url(f"{cluster.url}/sign-in")
    assert await page.context.cookies() == []
    assert (await page.request.get(f"{cluster.url}/metrics")).status == 401
    await page.close()


async def test_a_page_whose_session_is_over_asks_for_the_key_again(
    browser: Browser, cluster: LocalCluster
) -> None:
    page = await browser.new_page()
    await signed_in(page, cluster.url)
    await expect(page.locator("#state")).to_have_text("ready")
    await page.context.clear_cookies()
    # The stream goes on; it is the next connection that is refused.
    await page.evaluate("location.reload()")
    await expect(page).to_have_url(f"{cluster.url}/sign-in")
    await page.close()


async def test_a_page_of_another_site_can_send_nothing_with_the_session(
    browser: Browser, cluster: LocalCluster
) -> None:
    page = await browser.new_page()
    await signed_in(page, cluster.url)
    # Another port is another origin, though browsers call it the same site and send the cookie along.
    elsewhere = str(cluster.nodes[0].ready["metrics_url"]).replace("/metrics", "/healthz")
    await page.goto(elsewhere)
    await page.evaluate(
        """(url) => {
            const form = document.createElement("form");
            Object.assign(form, { method: "post", action: `${url}/sign-out` });
            document.body.append(form);
            form.submit();
        }""",
        cluster.url,
    )
    await expect(page.locator("body")).to_contain_text("came from a page of another site")
    assert len(await page.context.cookies()) == 1
    await page.goto(cluster.url)
    await expect(page.locator("#state")).to_have_text("ready")
    await page.close()


async def test_a_tenants_page_has_its_own_requests_only(browser: Browser, cluster: LocalCluster) -> None:
    of_other = await ask(cluster.url, "What one tenant asks is not for another. " * 4)
    own = await ask(cluster.url, "What one tenant asks is not for another. " * 4, key="sk-2")
    errors: list[str] = []
    page = await browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    await signed_in(page, cluster.url, "sk-page")
    await expect(page.locator("#state")).to_have_text("ready")
    await expect(page.locator("#requests tbody tr")).to_have_count(1)
    await expect(page.locator("#requests tbody tr")).to_contain_text(own)
    await expect(page.get_by_role("navigation").get_by_role("link")).to_have_text(
        ["Cache", "Requests", "Usage", "Benchmarks", "Playground"]
    )
    await show(page, "Cache")
    await expect(page.locator("#tenants tbody tr")).to_have_count(1)
    await expect(page.locator("#tenants tbody tr")).to_contain_text("other")
    await expect(page.locator("#outcomes")).to_contain_text("never seen")
    parts = ("#map", "#now", "#transfers", "#latency", "#events", "#reuse", "#prefixes", "#nodes")
    for view in ("cache", "cluster", "transfers", "latency", "fleet"):
        # Also by an address that others have sent.
        await page.evaluate("(view) => { location.hash = `#/${view}` }", view)
        for part in parts:
            await expect(page.locator(part)).not_to_be_visible()
        text = await page.evaluate("document.body.textContent")
        assert of_other not in text
        assert MARKUP not in text.replace(await page.locator("#model").text_content() or "", "")
    await page.locator("#requests tbody tr").get_by_role("link").click()
    await expect(page.locator("#timeline h3")).to_have_text(own)
    asked = "(id) => fetch(`/v1/requests/${id}/timeline`).then((answer) => answer.status)"
    assert await page.evaluate(asked, own) == 200
    assert await page.evaluate(asked, of_other) == 404
    for path in ("/metrics", "/v1/cluster", "/v1/index/prefill-0", "/v1/prometheus-targets"):
        assert await page.evaluate("(path) => fetch(path).then((answer) => answer.status)", path) == 403
    assert errors == []
    await page.close()
