"""A headless Chromium in front of the whole server. Without one these tests fail in CI and are skipped elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support.engine_server import engine_server
from tests.support.screens import DESKTOP, OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

AXE = Path(__file__).parent / "axe" / "axe.min.js"


@pytest.fixture(scope="module")  # while it runs, the thread counts as having an event loop: async tests would fail
def browser() -> Iterator[Browser]:
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("CI needs Chromium: .ci/run installs it")
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_url(smollm2_path: Path) -> Iterator[str]:
    """The default model behind the whole server, on one core: the browser needs the other."""
    with engine_server(str(smollm2_path), model={"served_names": ["smollm2"]}) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages of a kind; at the end no script has failed and no request has left the machine."""
    contexts = []
    faults: list[str] = []
    hosts: set[str | None] = set()

    def open_page(url: str, *, ready: bool = True, expects_refusals: bool = False, **options: Any) -> Page:
        context = browser.new_context(**(options or DESKTOP))
        contexts.append(context)
        context.add_init_script(path=AXE)
        context.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda message: (
                faults.append(message.text)
                if message.type in ("error", "warning") and not (expects_refusals and "401" in message.text)
                else None
            ),
        )
        page.goto(url)
        if ready:
            page.wait_for_selector("#phase[data-phase=ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
    assert hosts <= {"127.0.0.1"}
