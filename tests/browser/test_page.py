"""The dashboard as a person uses it: chats, stops, watches the engine, by pointer and by keyboard, large and small."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from configs.loader import load_profile
from configs.operation import ApiKeySection
from runners.api.app import create_app
from runners.api.settings import ApiSettings
from tests.support.live_server import LiveServer, live_server
from tests.support.screens import DESKTOP, PHONE, OpenPage
from tests.support.scripted_engine import ScriptedEngine
from tests.support.watched_engine import watched

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api").expect

KEY = "wl-browser-test"
WAIT_MS = 30_000


def send(page: Page, text: str, max_tokens: int) -> None:
    if not page.locator("#max-tokens").is_visible():
        page.locator(".settings summary").click()
    page.fill("#temperature", "0")  # the same answer every time
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#prompt", text)
    page.click("#send")


def wait_for_text(page: Page, more_than: int = 0) -> int:
    """Length of the last answer, once it is longer than that."""
    output = page.locator(".message.answer .text").last
    for _ in range(400):
        length = len(output.text_content() or "")
        if length > more_than:
            return length
        page.wait_for_timeout(25)
    raise AssertionError(f"the answer is no longer than {more_than} characters")


def wait_for_end(page: Page) -> str:
    """What the last answer cost, once it has ended."""
    expect(page.locator(".message.answer").last).to_have_attribute("aria-busy", "false", timeout=WAIT_MS)
    return page.locator(".message.answer .facts > span").last.text_content() or ""


def number(page: Page, selector: str) -> float:
    return float((page.locator(selector).text_content() or "").replace(",", "").replace("–", "0"))


def tile(title: str) -> str:
    return f"#tiles > div:has(dt:text-is('{title}')) .value"


def picture(page: Page) -> str:
    return str(page.evaluate("() => document.getElementById('timeline').toDataURL()"))


def test_a_chat_streams_while_the_engine_shows_its_steps(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url)
    idle = picture(page)
    expect(page.locator("#timeline-empty")).to_be_visible()
    send(page, "Count from one to thirty, in words.", 120)
    seen = wait_for_text(page)
    assert page.locator(".message.answer").get_attribute("aria-busy") == "true"
    assert wait_for_text(page, seen) > seen, "tokens come one after the other"
    expect(page.locator("#slots li[data-does]")).to_have_count(1)
    expect(page.locator("#timeline-empty")).to_be_hidden()
    first = picture(page)
    page.wait_for_timeout(300)
    assert len({idle, first, picture(page)}) == 3, "the timeline moves"
    facts = wait_for_end(page)
    assert re.search(r"^\d+ tokens · [\d,.]+ tok/s · [\d,.]+ ms to the first · (length|stop)$", facts), facts
    assert sum(number(page, f"#legend li[data-kind={kind}] b") for kind in ("decode", "sequential")) > 0
    assert number(page, tile("Output")) > 0
    expect(page.locator("#slots li[data-does]")).to_have_count(0, timeout=WAIT_MS)
    expect(page.locator("#chat-status")).to_contain_text("Answer complete")


def test_the_second_turn_finds_the_first_in_the_cache(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url)
    send(page, "Name three seas, and say one sentence about each of them.", 40)
    wait_for_end(page)
    send(page, "And three rivers?", 8)
    wait_for_text(page)
    wait_for_end(page)
    assert page.locator(".message").count() == 4
    page.wait_for_timeout(1200)
    assert number(page, tile("Prefix hits")) > 0


def test_stop_ends_an_answer_and_frees_its_slot(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url)
    send(page, "Write a very long story about a lighthouse.", 1500)
    wait_for_text(page)
    expect(page.locator("#stop")).to_be_focused()
    page.keyboard.press("Enter")
    facts = wait_for_end(page)
    assert facts.endswith("stopped")
    assert 0 < int(facts.split()[0].replace(",", "")) < 1500
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(tile("Running"))).to_have_text("0", timeout=WAIT_MS)
    expect(page.locator("#prompt")).to_be_focused()


def test_copied_curl_asks_the_same(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url, **DESKTOP, permissions=["clipboard-read", "clipboard-write"])
    page.locator(".settings summary").click()
    page.fill("#system", "Don't say much.")
    page.fill("#seed", "7")
    send(page, "It's a 'quoted' \"word\"\nand a line.", 5)
    wait_for_end(page)
    page.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    words = shlex.split(page.evaluate("() => navigator.clipboard.readText()").replace("\\\n", " "))
    assert words[:2] == ["curl", f"{page_url}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["seed"] == 7
    assert [message["content"] for message in body["messages"]] == [
        "Don't say much.",
        "It's a 'quoted' \"word\"\nand a line.",
    ]
    answer = httpx.post(words[1], json=body, timeout=60)
    assert answer.status_code == 200
    assert "[DONE]" in answer.text


def test_profile_shows_where_values_come_from(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url)
    page.fill("#profile-filter", "sub_wave")
    row = page.locator("#profile-table tbody tr:not(.section)")
    expect(row).to_have_count(1)
    assert [cell.strip() for cell in row.locator("td").all_text_contents()][:3] == ["sub_wave", "32", "default"]
    page.fill("#profile-filter", "no such setting")
    expect(page.locator("#profile-table")).to_have_text("No setting is like that.")


def test_by_keyboard_alone(page_url: str, open_page: OpenPage) -> None:
    page = open_page(page_url)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("Say hello.")
    page.keyboard.press("Enter")
    wait_for_text(page)
    page.keyboard.press("Enter")  # Stop has the focus while the answer comes
    wait_for_end(page)
    page.locator("#pause").focus()
    page.keyboard.press("Space")
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_jumps_and_nothing_is_cut_off(page_url: str, open_page: OpenPage, size: dict[str, Any]) -> None:
    page = open_page(page_url, **size)
    page.evaluate(
        "() => { window.shifts = []; new PerformanceObserver(list => { for (const e of list.getEntries())"
        " if (!e.hadRecentInput) window.shifts.push([e.value, e.sources.map(s => s.node?.id || s.node?.className)]); })"
        ".observe({type: 'layout-shift', buffered: false}); }"
    )
    page.locator("#steps-title").scroll_into_view_if_needed()
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{page_url}/v1/completions", json=body, timeout=60) as response:
        assert sum(line.startswith("data: ") for line in response.iter_lines()) > 30
    page.wait_for_timeout(1500)
    assert sum(value for value, _ in page.evaluate("() => window.shifts")) < 0.01, page.evaluate("() => window.shifts")
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    cut = page.evaluate(
        "() => [...document.querySelectorAll('.value, .unit, button, dt, dd, h3, th')].filter("
        "node => node.checkVisibility() && node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0"
        " && getComputedStyle(node).display !== 'inline').map(node => node.textContent)"
    )
    assert cut == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_no_serious_fault(page_url: str, open_page: OpenPage, size: dict[str, Any], scheme: str) -> None:
    page = open_page(page_url, **size, color_scheme=scheme)
    for chats in (False, True):
        if chats:
            send(page, "Say hello.", 8)
            wait_for_end(page)
            page.locator("#steps-as-table summary").click()
        result = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (fault["id"], [node["html"] for node in fault["nodes"]][:3])
            for fault in result["violations"]
            if fault["impact"] in ("serious", "critical")
        ]
        assert serious == []
        assert result["passes"], "axe has looked at something"


@pytest.fixture
def locked_server() -> Iterator[LiveServer]:
    keys = [ApiKeySection(name="p", sha256=hashlib.sha256(KEY.encode()).hexdigest())]
    engine = ScriptedEngine()
    app = create_app(ApiSettings(keys=keys), engine)
    app.state.feed = watched(engine, load_profile("balanced", {}))
    with live_server(app, engine) as server:
        yield server


def test_a_key_is_asked_for_and_kept_in_the_tab_only(locked_server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(locked_server.url, ready=False, expects_refusals=True)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    expect(page.locator("#key")).to_be_focused()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-reason")).to_contain_text("not valid")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#phase[data-phase=ready]")
    expect(dialog).to_be_hidden()
    assert KEY not in page.url
    assert page.evaluate("() => [Object.values(localStorage), document.cookie]") == [[], ""]
    page.reload()
    page.wait_for_selector("#phase[data-phase=ready]")


def test_a_page_that_is_closed_lets_go_of_the_engine(locked_server: LiveServer, open_page: OpenPage) -> None:
    page = open_page(locked_server.url, ready=False, expects_refusals=True)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#phase[data-phase=ready]")
    assert locked_server.engine.feed.num_watchers == 1
    page.close()
    locked_server.wait_until(lambda: locked_server.engine.feed.num_watchers == 0)
