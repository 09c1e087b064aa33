"""The playground in a real browser: what it shows is what the server sent."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Layout
from helpers.api import app_of, over_http, replica_of
from jobs.serving.keys import ApiKeys

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if TYPE_CHECKING:
    from playwright.sync_api import Page
KEY = "the-key"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def url(embedded_pair: Pair) -> Iterator[str]:
    with (
        replica_of(embedded_pair, num_slots=2, max_length=600) as replica,
        over_http(app_of(replica, keys=ApiKeys.of((KEY,)))) as root,
    ):
        yield f"{root}/"


@pytest.fixture
def page(url: str) -> Iterator["Page"]:
    """The page in a browser; whatever it complains about fails the test."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 800})
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        yield page
        browser.close()
    assert not complaints


def log_in(page: "Page") -> None:
    page.fill("#key", KEY)
    page.dispatch_event("#key", "change")
    page.wait_for_selector("#model option", state="attached")


@pytest.mark.parametrize(("together", "layout"), [(False, "tree"), (True, "chain")])
def test_both_answers_are_the_targets_own_and_their_blocks_are_coloured(
    page: "Page", embedded_pair: Pair, together: bool, layout: Layout, tmp_path: Path
) -> None:
    pair, prompt = embedded_pair, Prompt("test", (Message("user", "What is a block?"),))
    steps = list(generate(pair, prompt.encode(pair.tokenizer), block_size=4, layout=layout, max_new_tokens=40))
    want = pair.tokenizer.decode([t for step in steps for t in step.tokens], skip_special_tokens=True)
    assert any(step.num_accepted for step in steps)
    log_in(page)
    page.fill("#prompt", "What is a block?")
    page.fill("#tokens", "40")
    page.select_option("#size", "4")
    page.select_option("#layout", layout)
    page.set_checked("#together", together)
    page.click("#go")
    page.wait_for_selector("#verdict:not(:empty)")
    assert "The same text, bit for bit" in page.inner_text("#verdict")
    for panel in ("#adaptive", "#plain"):
        assert page.text_content(f"{panel} .text") == want
        assert re.search(r"40 tokens, [\d.]+ tokens/s", page.inner_text(f"{panel} .figures"))
    assert page.locator("#adaptive .text .accepted").count() == sum(step.num_accepted for step in steps)
    assert page.locator("#adaptive .text .bonus").count() == sum(len(s.tokens) - s.num_accepted for s in steps[1:])
    assert page.locator("#plain .text .accepted").count() == 0
    best = max(range(1, len(steps)), key=lambda i: steps[i].num_accepted)
    page.hover(f"#adaptive .sizes i:nth-child({best})")
    assert page.locator("#adaptive .tree .node:not(.bonus)").count() == len(steps[best].tree.tokens)
    assert page.locator("#adaptive .tree .accepted").count() == steps[best].num_accepted > 0
    assert page.locator("#adaptive .sizes i").count() == len(steps) - 1
    assert f"{len(steps) - 1} steps" in page.inner_text("#adaptive .figures")
    page.screenshot(path=tmp_path / "playground.png")
    assert (tmp_path / "playground.png").stat().st_size > 10_000


def test_errors_are_shown_and_a_stop_is_one(page: "Page") -> None:
    page.wait_for_selector("#verdict:has-text('API key')")
    log_in(page)
    page.fill("#tokens", "100000")
    page.click("#go")
    page.wait_for_selector("#plain .error")
    assert "100000" in page.inner_text("#adaptive .error")
    page.fill("#tokens", "500")
    page.select_option("#size", "2")
    page.click("#go")
    page.wait_for_selector("#adaptive .text span")
    page.click("#stop")
    page.wait_for_selector("#adaptive .error")
    assert page.inner_text("#adaptive .error") == "stopped"
    page.wait_for_selector("#go:not([disabled])")


def test_what_a_prompt_says_is_never_markup(page: "Page") -> None:
    log_in(page)
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.fill("#tokens", "5")
    page.click("#go")
    page.wait_for_selector("#go:not([disabled])")
    assert page.locator("img").count() == 0
