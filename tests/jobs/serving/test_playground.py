"""Playground in a real browser: it shows what the server sent."""

import json
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.native.library import has_functions
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import DRAFTED, LOOKED_UP, Layout, Request, Step
from helpers.api import app_of, over_http, replica_of
from jobs.serving.clients import ApiKeys

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page
KEY = "the-key"
QUESTION = "What is a block?"
FOX = "The quick brown fox jumps over the lazy dog near the river bank."
REPEAT = f"Repeat this: {FOX} {FOX}"
CLASSES = {0: "constraint", DRAFTED: "draft", LOOKED_UP: "lookup", DRAFTED + LOOKED_UP: "both"}
SCHEMA = {"type": "object", "properties": {"count": {"enum": [7]}}, "required": ["count"]}
SCHEMA |= {"additionalProperties": False}
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

# Texts whose contrast with the background is less than 4.5 to 1, WCAG's minimum for small text.
PALE = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => numbers(colour).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = of => numbers(getComputedStyle(of).backgroundColor)[3] === 0 ? ground(of.parentElement) : of;
  const pale = [];
  for (const element of document.querySelectorAll("body *:not(:disabled):not(script)")) {
    const written = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!written || !element.checkVisibility()) continue;
    const colours = [getComputedStyle(element).color, getComputedStyle(ground(element)).backgroundColor];
    const [low, high] = colours.map(light).sort((a, b) => a - b), ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) pale.push(`${element.className} ${element.textContent}: ${ratio.toFixed(2)}`);
  }
  return pale;
}"""
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button")]
  .filter(element => !(element.labels?.length || element.ariaLabel || element.textContent.trim()))
  .map(element => element.outerHTML)"""


@pytest.fixture(scope="module")
def url(embedded_pair: Pair) -> Iterator[str]:
    with (
        replica_of(embedded_pair, num_slots=2, max_length=600) as replica,
        over_http(app_of(replica, keys=ApiKeys.of((KEY,)))) as root,
    ):
        yield f"{root}/"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: "Browser", url: str) -> Iterator["Page"]:
    """Page with the API key, which it asks for when opened; any error on the page fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#server:has-text('API key')")
    page.fill("#key", KEY)
    page.dispatch_event("#key", "change")
    page.wait_for_selector("#model option", state="attached")
    yield page
    context.close()
    assert not complaints


def ask(page: "Page", prompt: str, **settings: str) -> dict[str, Any]:
    """Send a prompt with settings, by their names on the page, wait for the answer, and return the sent body."""
    for name, value in settings.items():
        page.locator(f"#{name}").evaluate("(field, value) => { field.value = value; }", value)
    page.fill("#prompt", prompt)
    with page.expect_request("**/chat/completions") as sent:
        page.press("#prompt", "Enter")
    page.wait_for_selector("#go:not([disabled])")
    return dict(sent.value.post_data_json)


def decoded(pair: Pair, *turns: str, **settings: Any) -> tuple[str, list[Step]]:
    """Target's answer to a conversation that the user begins, and the steps that made it."""
    roles = ("user", "assistant")
    prompt = Prompt("test", tuple(Message(roles[i % 2], turn) for i, turn in enumerate(turns)))
    steps = list(generate(pair, prompt.encode(pair.tokenizer), **settings))
    return pair.tokenizer.decode([t for step in steps for t in step.tokens], skip_special_tokens=True), steps


def figure(page: "Page", name: str) -> str:
    """Figure of the last answer by its name; "" if it is not shown."""
    texts = page.locator(".usage").last.locator("dt, dd").all_text_contents()
    return dict(zip(texts[::2], texts[1::2], strict=True)).get(name, "")


def assert_readable(page: "Page") -> None:
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(PALE) == []


@pytest.mark.parametrize(("layout", "temperature"), [("tree", 0.0), ("chain", 0.8)])
def test_the_answer_is_the_targets_own_and_every_step_is_shown_as_a_tree(
    page: "Page", embedded_pair: Pair, layout: Layout, temperature: float
) -> None:
    expected, steps = decoded(
        embedded_pair, QUESTION, block_size=5, layout=layout, temperature=temperature, seed=3, max_new_tokens=30
    )
    ask(page, QUESTION, tokens="30", size="5", layout=layout, temperature=str(temperature), seed="3")
    assert "the same text" in page.inner_text(".verdict")
    assert re.search(r"[\d.]+ times as fast", page.inner_text(".verdict"))
    assert page.text_content(".text") == expected
    assert page.locator(".text .accepted").count() == sum(step.num_accepted for step in steps)
    assert page.locator(".text .own").count() == sum(len(step.tokens) - step.num_accepted for step in steps[1:])
    assert page.locator(".bars i").count() == len(steps) - 1
    assert (figure(page, "steps"), figure(page, "answer tokens")) == (str(len(steps) - 1), "30")
    assert (figure(page, "layout"), figure(page, "block size")) == (layout, "5")
    assert figure(page, "seed") == ("3" if temperature else "")

    best = max(range(1, len(steps)), key=lambda i: (len(steps[i].path), steps[i].path))
    page.click(f".bars i:nth-child({best})")
    check_tree(page, steps[best])
    assert f"Step {best} of {len(steps) - 1}: " in page.inner_text(".caption")
    assert page.locator(".text .shown").count() == len(steps[best].tokens)
    page.click(".back" if best > 1 else ".on")
    check_tree(page, steps[best - 1 if best > 1 else 2])


def check_tree(page: "Page", step: Step) -> None:
    """Check that drafted tokens are right of their parents and not above them; the accepted path is marked."""
    nodes = page.locator(".tree .node").all()
    drafted = nodes[1 : 1 + len(step.tree.tokens)]
    assert len(nodes) == 1 + len(step.tree.tokens) + len(step.tokens) - step.num_accepted
    boxes = [node.bounding_box() or pytest.fail("a node is not shown") for node in nodes]
    for i, parent in enumerate(step.tree.parents, start=1):
        assert boxes[i]["x"] > boxes[parent]["x"] + boxes[parent]["width"]
        assert boxes[i]["y"] > boxes[parent]["y"] - 5
    assert len({(box["x"], box["y"]) for box in boxes}) == len(boxes)
    classes = [(node.get_attribute("class") or "").split() for node in drafted]
    assert [i for i, names in enumerate(classes, start=1) if "accepted" in names] == sorted(step.path)
    assert all(CLASSES[source] in names for source, names in zip(step.tree.sources, classes, strict=True))


@pytest.mark.skipif(not has_functions(), reason="texts are indexed by the library in C")
def test_looked_up_tokens_have_another_colour_in_tree_text_and_legend(page: "Page", embedded_pair: Pair) -> None:
    prompt = Prompt("test", (Message("user", REPEAT),)).encode(embedded_pair.tokenizer)
    stops = embedded_pair.stop_token_ids
    engine = Engine(embedded_pair, num_slots=1, max_length=600)
    engine.add(Request(prompt, 40, block_size=6, layout="tree", lookup=True, stop_token_ids=stops))
    steps = list[Step]()
    while not engine.idle:
        steps += engine.step()
    body = ask(page, REPEAT, tokens="40", size="6", layout="tree", lookup="on")
    assert body["lookup"] is True
    assert "the same text" in page.inner_text(".verdict")
    accepted = [CLASSES[source] for step in steps for source in step.accepted_sources]
    shown = [(node.get_attribute("class") or "").split()[1] for node in page.locator(".text .accepted").all()]
    assert shown == accepted
    assert "both" in accepted
    assert figure(page, "looked up") == str(sum(name in ("lookup", "both") for name in accepted))

    sources, colours = set[int](), dict[str, str]()
    for i, step in enumerate(steps[1:], start=1):
        if sources >= set(step.tree.sources):
            continue
        sources |= set(step.tree.sources)
        page.click(f".bars i:nth-child({i})")
        check_tree(page, step)
        num_looked_up = sum(source >= LOOKED_UP for source in step.tree.sources)
        caption = f" proposed ({num_looked_up} looked up), " if num_looked_up else " drafted, "
        assert caption in page.inner_text(".caption")
        for name in ("draft", "lookup", "both"):
            for node in page.locator(f".tree .node.{name}").all()[:1]:
                colours[name] = node.evaluate("node => getComputedStyle(node).borderTopColor")
    assert len(set(colours.values())) == 3
    legend = {name: page.inner_text(f".key .accepted.{name}") for name in ("lookup", "both")}
    assert legend == {"lookup": "looked up and accepted", "both": "drafted, looked up, accepted"}
    assert_readable(page)
    assert ask(page, REPEAT, tokens="2", size="auto", lookup="off")["lookup"] is False
    assert ask(page, REPEAT, tokens="2", lookup="auto")["lookup"] is None


def test_the_token_that_ends_an_answer_is_shown_with_its_step(page: "Page", embedded_pair: Pair) -> None:
    question = "What is the capital of France?"
    expected, steps = decoded(embedded_pair, question, block_size=4, max_new_tokens=40)
    assert steps[-1].finish_reason == "stop"
    ask(page, question, tokens="40", size="4", layout="chain")
    assert page.text_content(".text") == expected
    assert figure(page, "answer tokens") == str(sum(len(step.tokens) for step in steps))
    page.click(".bars i:last-child")
    assert page.inner_text(".caption").endswith("⟨end⟩")
    check_tree(page, steps[-1])
    assert page.locator(".bars i:last-child b").count() == len(steps[-1].tokens)


def test_a_second_turn_takes_the_first_along_and_tells_what_was_cached(page: "Page", embedded_pair: Pair) -> None:
    settings = {"tokens": "20", "size": "4", "layout": "chain"}
    first, _ = decoded(embedded_pair, QUESTION, block_size=4, max_new_tokens=20)
    second, _ = decoded(embedded_pair, QUESTION, first, "Why?", block_size=4, max_new_tokens=20)
    page.uncheck("#compare")
    ask(page, QUESTION, **settings)
    body = ask(page, "Why?", **settings)
    assert [message["content"] for message in body["messages"]] == [QUESTION, first, "Why?"]
    assert page.locator(".text").all_text_contents() == [first, second]
    num_prompt, num_cached = map(int, re.findall(r"\d+", figure(page, "prompt tokens")))
    assert 16 <= num_cached < num_prompt
    assert page.locator(".tree:visible").count() == 1  # earlier ones are folded
    page.locator(".text").first.locator("[data-step]").first.click()
    assert page.locator(".tree:visible").count() == 2
    page.click("#fresh")
    assert page.locator(".answer").count() == 0
    assert len(ask(page, QUESTION, **settings)["messages"]) == 1


def test_a_structured_answer_follows_the_schema_that_stands_on_the_page(page: "Page") -> None:
    page.select_option("#format", "json_schema")
    page.fill("#schema", json.dumps(SCHEMA)[:-1])
    page.fill("#prompt", QUESTION)
    page.click("#go")
    assert page.inner_text("#schema-problem").startswith("schema: ")
    assert page.locator(".answer").count() == 0
    page.fill("#schema", json.dumps(SCHEMA))
    assert page.inner_text("#schema-problem") == ""
    body = ask(page, QUESTION)
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert json.loads(page.inner_text(".text")) == {"count": 7}
    assert figure(page, "JSON") == "valid"
    assert "the same text" in page.inner_text(".verdict")
    page.select_option("#format", "json_object")
    assert not page.is_visible("#schema")
    assert ask(page, QUESTION, tokens="3")["response_format"] == {"type": "json_object"}
    assert page.locator(".text").last.inner_text().startswith("{")
    assert (figure(page, "JSON"), figure(page, "finish")) == ("not complete", "length")


def test_errors_are_shown_a_stop_is_one_and_an_unanswered_prompt_comes_back(page: "Page") -> None:
    ask(page, QUESTION, tokens="100000")
    assert "100000" in page.inner_text(".error")
    assert page.input_value("#prompt") == QUESTION
    page.fill("#tokens", "500")
    page.select_option("#size", "2")
    page.click("#go")
    page.wait_for_selector(".text span")
    page.click("#stop")
    page.wait_for_selector("#go:not([disabled])")
    assert page.locator(".error").last.inner_text() == "stopped"
    assert page.input_value("#prompt") == ""
    prompt = "<img src=x onerror=alert(1)> & <b>"
    messages = ask(page, prompt, tokens="5")["messages"]
    assert len(messages) == 3  # the partial answer is part of the conversation
    assert messages[-1] == {"role": "user", "content": prompt}
    assert page.locator(".user").last.text_content() == prompt
    assert page.locator("img, .user *").count() == 0  # a prompt is never interpreted as markup


def test_all_texts_stand_out_all_controls_have_names_and_nothing_lies_outside(page: "Page") -> None:
    page.select_option("#format", "json_schema")
    page.fill("#schema", "{")
    assert_readable(page)
    page.select_option("#format", "text")
    ask(page, QUESTION, tokens="20", layout="tree", size="8")
    ask(page, QUESTION, tokens="100000")
    page.click(".blocks >> nth=0")
    assert page.locator(".tree .accepted:visible, .tree .own:visible, .text .shown, .error").count() > 2
    assert_readable(page)
    assert page.evaluate(NAMELESS) == []
    for width in (360, 820, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator("#go").bounding_box()["y"] < 800
