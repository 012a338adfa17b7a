"""The page in a real browser, and the endpoints as a program calls them."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from app_server import app_server
from held_app import ANSWERS
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from waiting import LONG

from osd_hf_app.pair import NAME, cache_folder

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 1000 * LONG  # milliseconds
QUICK = {
    "update_interval": 4, "steps_per_update": 4, "optimizer": "adamw", "learning_rate": 2e-3, "weight_average": 0.0,
}  # fmt: skip
# Nothing on the page moves by itself: drawn without an accelerator, that takes longer than answering.
STILL = """addEventListener("DOMContentLoaded", () => {
    const style = document.createElement("style");
    style.textContent = "*, *::before, *::after { animation: none !important; transition: none !important }";
    document.head.append(style);
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser on this machine: none of {', '.join(NAMES)}")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An app that learns in short: sixteen prompts are enough for a version that is promoted."""
    with app_server(tmp_path_factory.mktemp("saved"), "--threads", "1", **QUICK) as address:
        yield address


@contextmanager
def window(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(PATIENCE)
    context.add_init_script(STILL)
    yield context
    context.close()


def opened(context: BrowserContext, address: str) -> Page:
    """A new tab, of the visitor that this window is known as at the address."""
    page = context.new_page()
    page.errors = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.errors.append(str(error)))  # type: ignore[attr-defined]
    page.on("dialog", lambda dialog: page.errors.append(f"dialog {dialog.message}"))  # type: ignore[attr-defined]
    page.goto(address)
    known(page)
    return page


def known(page: Page) -> None:
    """Wait until the page knows its visitor."""
    expect(page.locator("#send")).to_be_enabled(timeout=PATIENCE)
    unfold(page, "#versions", "#state")


@pytest.fixture(scope="module")
def open_page(browser: Browser, address: str) -> Iterator[Page]:
    with window(browser) as context:
        yield opened(context, address)


@pytest.fixture(scope="module")
def other_open_page(browser: Browser, address: str) -> Iterator[Page]:
    with window(browser) as context:
        yield opened(context, address)


@pytest.fixture
def page(open_page: Page) -> Page:
    """One that a visitor of the app at `address` has open, without a chat."""
    return cleared(open_page)


@pytest.fixture
def other_page(other_open_page: Page) -> Page:
    """That of another visitor."""
    return cleared(other_open_page)


@pytest.fixture
def new_page(page: Page, address: str) -> Iterator[Page]:
    """Another tab of the same visitor, scrolled nowhere; it is closed where the test fails, too."""
    with closing(opened(page.context, address)) as page:
        yield page


def cleared(page: Page) -> Page:
    page.locator("#clear").click()
    expect(page.locator("#chat .osd-you, #chat [role=alert]")).to_have_count(0)
    return page


def unfold(page: Page, part: str, inside: str) -> None:
    if not page.locator(inside).is_visible():
        page.locator(f"{part} button").first.click()


def ask(page: Page, text: str) -> None:
    """Send a prompt, and wait for its whole answer."""
    before = page.locator("#chat .osd-figures", has_text="target pass").count()
    page.fill("#prompt textarea", text)
    page.press("#prompt textarea", "Enter")
    expect(page.locator("#chat .osd-figures", has_text="target pass")).to_have_count(before + 1)
    answered(page)


def answered(page: Page) -> None:
    """Wait until nothing more is being answered: the page's last word of an answer that is checked."""
    expect(page.locator("#chat .osd-figures").last).not_to_contain_text("…")


def choose(page: Page, group: str, name: str) -> None:
    page.locator(f"{group} label", has_text=re.compile(rf"^\s*{name}\s*$")).click()


def last_rate(page: Page, side: str) -> float:
    return float(page.locator(f"#curves polyline.osd-{side}").get_attribute("data-last") or "nan")


def reset(page: Page) -> None:
    unfold(page, "#keep", "#reset")
    page.locator("#reset").click()
    expect(page.locator("#kept")).to_contain_text("was reset")


def places_of(page: Page, *names: str) -> list[tuple[float, ...]]:
    """Where parts of the page lie on it, however far it is scrolled, and how large they are."""
    scrolled, boxes = page.evaluate("window.scrollY"), [page.locator(name).bounding_box() for name in names]
    return [(box["x"], box["y"] + scrolled, box["width"], box["height"]) for box in boxes if box is not None]


# --- one visitor ----------------------------------------------------------------------------------------------------


def test_acceptance_rises_while_one_chats(new_page: Page) -> None:
    page = new_page
    for _ in range(2):
        page.locator("#suggest").click()
        expect(page.locator("#prompt textarea")).not_to_have_value("")
        ask(page, page.locator("#prompt textarea").input_value())
        assert page.locator("#prompt textarea").input_value() == ""
    # Tokens by origin, and what the draft had said.
    assert page.locator("#chat .osd-accepted").count() > 0
    corrected = page.locator("#chat .osd-corrected").first
    assert re.fullmatch(r"the draft said “.*” \(\d+%\)", corrected.get_attribute("data-said") or "", re.DOTALL)
    figures = page.locator("#chat .osd-figures").last.inner_text()
    for part in ("tokens/s", "tokens per target pass", "× the target alone", "the target alone says the same"):
        assert part in figures
    assert re.search(r"α [01]\.\d", figures)
    # Twenty prompts of a domain: the draft that learns leaves the frozen one behind.
    places = places_of(page, "#prompt", "#curves", "#shown")
    choose(page, "#domain", "finance")
    page.locator("#twenty").click()
    expect(page.locator("#chat")).to_contain_text("20 of 20 answered, done")
    choose(page, "#shown", "finance")
    expect(page.locator("#curves figcaption")).to_contain_text("finance")
    row = page.locator("#table tbody tr", has_text="finance").locator("td")
    expect(row.nth(1)).to_have_text("20")  # the panel, drawn every two seconds, has come to the end
    expect(page.locator("#curves .osd-promoted").first).to_be_visible()
    assert last_rate(page, "learning") > last_rate(page, "frozen") + 0.02
    expect(page.locator("#state")).to_contain_text("promoted")
    assert places_of(page, "#prompt", "#curves", "#shown") == places  # nothing jumped
    # The next domain is served by a draft of its own, and can be stopped.
    choose(page, "#domain", "sql")
    page.locator("#twenty").click()
    expect(page.locator("#chat")).to_contain_text(f"{ANSWERS} of 20 answered")
    page.locator("#stop").click()
    expect(page.locator("#chat")).to_contain_text(f"{ANSWERS} of 20 answered, stopped")
    expect(page.locator("#table")).to_contain_text("sql")
    # And all is as it was.
    reset(page)
    choose(page, "#shown", "all domains")
    expect(page.locator("#curves polyline")).to_have_count(0)
    expect(page.locator("#state")).to_contain_text("the original draft")
    page.locator("#clear").click()
    expect(page.locator("#chat .osd-you")).to_have_count(0)
    assert page.errors == []  # type: ignore[attr-defined]


def test_a_new_page_shows_what_learning_does_without_a_click(browser: Browser, tmp_path: Path) -> None:
    with app_server(tmp_path, "--threads", "1", demonstrates=True) as address, window(browser) as context:
        page = opened(context, address)
        learned = page.locator("#compared .osd-head").nth(1)
        expect(learned).to_contain_text(re.compile(r"learning draft, version [1-9]"))
        expect(page.locator("#headline")).to_contain_text("by learning")
        assert last_rate(page, "learning") > last_rate(page, "frozen")
        frozen, learning = (each.inner_text() for each in page.locator("#compared .osd-answer").all())
        assert frozen == learning  # the same answer
        for width, height in ((1280, 800), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            for part in ("#headline", "#curves svg"):
                expect(page.locator(part)).to_be_in_viewport(ratio=1)
            expect(page.locator("#compared .osd-answer").first).to_be_in_viewport()
        assert page.errors == []  # type: ignore[attr-defined]


def test_an_answer_goes_on_while_its_visitor_is_away(page: Page, other_page: Page, address: str) -> None:
    choose(page, "#domain", "python")
    page.locator("#twenty").click()
    expect(page.locator("#chat")).to_contain_text(f"{ANSWERS} of 20 answered")
    page.goto("about:blank")
    ask(other_page, "What is 3 + 4?")  # comes in between
    page.goto(address)
    known(page)
    expect(page.locator("#chat")).to_contain_text(f"{ANSWERS} of 20 answered")
    page.locator("#stop").click()
    expect(page.locator("#chat")).to_contain_text(f"{ANSWERS} of 20 answered, stopped")
    assert "python" not in other_page.locator("#chat").inner_text()


def test_a_prompt_that_cannot_be_answered_is_told_and_markup_is_text(page: Page) -> None:
    for text, shown in (
        (" \x00\x07\x1b ", "The prompt is empty"),
        ("x" * 100_000, "100,000 characters; the maximum is 20,000"),
        ("word " * 3000, "tokens; these models take"),
    ):
        page.fill("#prompt textarea", text)
        page.press("#prompt textarea", "Enter")
        expect(page.locator("#chat [role=alert]")).to_contain_text(shown)
        assert page.locator("#prompt textarea").input_value() == text  # what was typed stays
    text = "<img src=x onerror='window.hacked=1'><script>window.hacked=2</script> <b>3 + 4</b>?\x07"
    ask(page, text)
    assert page.locator("#chat [role=alert]").count() == 0
    assert page.locator("#chat .osd-you").inner_text() == text.replace("\x07", "")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#chat img, #chat script, #chat b").count() == 0


def test_a_draft_of_ones_own_learns_apart(page: Page, other_page: Page) -> None:
    reset(other_page)
    unfold(page, "#settings", "#private")
    page.locator("#private input").check()
    expect(page.locator("#state")).to_contain_text("private")
    ask(page, "What is 3 + 4?")
    expect(page.locator("#table tbody tr").first).to_contain_text("1")
    expect(other_page.locator("#table tbody tr").first.locator("td").nth(1)).to_have_text("0")
    page.locator("#private input").uncheck()
    expect(page.locator("#state")).to_contain_text("shared")


def test_saving_and_pushing_say_what_came_of_it(page: Page) -> None:
    unfold(page, "#keep", "#save")
    page.locator("#save").click()
    expect(page.locator("#kept")).to_contain_text("Saved: ")
    page.fill("#repo textarea", "somebody/draft")
    page.locator("#push").click()
    expect(page.locator("#kept")).to_contain_text("Not pushed: ")


def test_phone_dark_and_keyboard(page: Page, address: str) -> None:
    with closing(page.context.new_page()) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        page.emulate_media(color_scheme="dark")
        page.context.new_cdp_session(page).send("Emulation.setTouchEmulationEnabled", {"enabled": True})
        page.goto(f"{address}?__theme=dark")
        known(page)
        assert page.evaluate("navigator.maxTouchPoints") > 0
        narrow = "document.documentElement.scrollWidth <= 390"
        page.wait_for_function(narrow)
        expect(page.locator("body")).to_have_class(re.compile("dark"))
        # By keyboard alone: type, tab to Send, press it, tab on to what was corrected.
        page.locator("#prompt textarea").focus()
        page.keyboard.type("What is 3 + 4?")
        page.keyboard.press("Tab")
        expect(page.locator("#send")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#chat .osd-figures", has_text="target pass")).to_have_count(1)
        answered(page)
        shown = "token => { token.focus(); return getComputedStyle(token, '::after').content }"
        corrected = page.locator("#chat .osd-corrected[data-said^='the draft']").first  # others are of past text
        assert "the draft said" in corrected.evaluate(shown)
        page.wait_for_function(narrow)
        # Every control has a name that a screen reader says.
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('input, textarea, button')].filter(e => e.offsetParent !== null
            && !e.labels?.length && !e.ariaLabel && !e.innerText.trim() && !e.title).map(e => e.outerHTML)"""
        )
        assert nameless == []


def test_two_visitors_at_once(page: Page, other_page: Page) -> None:
    pages = [page, other_page]
    reset(page)
    prompts = [[f"What is {i} + {j}?" for j in range(3)] for i in (11, 22)]
    for j in range(3):
        for page, own in zip(pages, prompts, strict=True):  # neither waits for the other
            page.fill("#prompt textarea", own[j])
            page.press("#prompt textarea", "Enter")
        for page in pages:
            expect(page.locator("#chat .osd-figures", has_text="target pass")).to_have_count(j + 1)
            answered(page)
    for page, own, others in zip(pages, prompts, reversed(prompts), strict=True):
        assert page.locator("#chat .osd-you").all_inner_texts() == own
        assert all(text not in page.content() for text in others)
        expect(page.locator("#table tbody tr").first.locator("td").nth(1)).to_have_text("6")
    ends = [page.locator("#curves polyline.osd-learning").get_attribute("points") for page in pages]
    assert ends[0] == ends[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_chats_and_reads_the_statistics(address: str) -> None:
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    client = Client(address, verbose=False)
    before: dict[str, Any] = client.predict(api_name="/statistics")
    job = client.submit("What is 3 + 4?", k="3", max_new_tokens=32, api_name="/chat")
    answer = job.result()
    assert answer["done"]
    assert answer["text"] == "".join(token["text"] for token in answer["tokens"])
    assert {token["origin"] for token in answer["tokens"]} <= {"accepted", "corrected", "bonus", "plain"}
    assert any(part["text"] and not part["done"] for part in job.outputs())  # it streams
    after = client.predict(api_name="/statistics")
    assert after["requests"] == before["requests"] + 1
    assert "3 + 4" not in str(after)
    with pytest.raises(AppError, match="The prompt is empty"):
        client.predict("", api_name="/chat")
    with pytest.raises(AppError, match="`k` must be"):
        client.predict("What is 3 + 4?", k="many", api_name="/chat")
    page = (Path(__file__).parents[1] / "app/README.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(shown.replace("http://127.0.0.1:7860", address), {})
    assert re.search(r" (None|\d\.\d+) \d\.\d+\n\{'requests'", printed.getvalue())


# --- strangers ------------------------------------------------------------------------------------------------------


def test_a_public_page_serves_visitors_and_shows_no_owners_controls(open_page: Page, tmp_path: Path) -> None:
    with (
        app_server(tmp_path, "--public", steps_per_update=1) as address,
        closing(opened(open_page.context, address)) as page,
    ):
        ask(page, "What is 3 + 4?")
        kept = page.evaluate("JSON.stringify(localStorage)")
        page.evaluate("localStorage.clear()")  # another visitor then
        page.reload()
        known(page)
        expect(page.locator("#chat .osd-you")).to_have_count(0)
        ask(page, "What is 5 + 6?")
        assert "3 + 4" not in page.content()
        page.evaluate("kept => { localStorage.clear(); Object.assign(localStorage, JSON.parse(kept)) }", kept)
        page.reload()
        known(page)
        expect(page.locator("#chat .osd-you")).to_have_text("What is 3 + 4?", timeout=PATIENCE)
        assert "5 + 6" not in page.content()
        assert page.locator("#keep").count() == 0 or not page.locator("#keep").is_visible()
        page.locator("#settings button").first.click()
        page.locator("#private input").check()
        expect(page.locator("#state")).to_contain_text("private", timeout=PATIENCE)
        assert page.errors == []  # type: ignore[attr-defined]


def test_the_newest_answer_is_in_sight(new_page: Page) -> None:
    page, long = new_page, "  \n" * 20
    page.set_viewport_size({"width": 1280, "height": 600})
    for i in range(2):
        ask(page, f"What is {i} +{long}4?")  # higher than what Gradio follows by itself
        expect(page.locator("#chat .osd-figures").last).to_be_in_viewport()
    page.locator("#chat .osd-you").first.scroll_into_view_if_needed()  # who reads an older one is left there
    page.evaluate("() => new Promise(requestAnimationFrame)")
    expect(page.locator("#chat .osd-figures").last).not_to_be_in_viewport()
    ask(page, f"What is 2 +{long}4?")
    expect(page.locator("#chat .osd-figures").last).to_be_in_viewport()
    assert page.errors == []  # type: ignore[attr-defined]


# --- what one sees over time ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["bundled", "smollm2"])
def test_screens_over_time(browser: Browser, tmp_path: Path, pair: str) -> None:
    """The page 10, 60 and 180 seconds after it was opened, at two widths. `OSD_HF_SCREENS` keeps the pictures."""
    if pair == "smollm2" and not (cache_folder() / NAME).is_dir():
        pytest.skip("SmolLM2 is not on this machine")
    folder = Path(os.environ.get("OSD_HF_SCREENS") or tmp_path)
    with app_server(tmp_path, "--pair", pair, demonstrates=True) as address, window(browser) as context:
        page, errors = context.new_page(), list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        opened_at = time.monotonic()
        page.goto(address)
        for seconds in (10, 60, 180):
            page.wait_for_timeout(max(opened_at + seconds - time.monotonic(), 0) * 1000)
            for width, height in ((1280, 800), (390, 844)):
                page.set_viewport_size({"width": width, "height": height})
                page.screenshot(path=folder / f"{pair}-{width}-{seconds}.png")
                expect(page.locator("#headline .osd-number")).to_be_in_viewport()
            parts = ("#headline", "#balance", "#compared .osd-head >> nth=1")
            seen = (page.locator(name).inner_text() for name in parts)
            print(f"{pair}, {seconds} s:", *(" ".join(text.split()) for text in seen), sep="\n  ")
        assert page.locator("#compared .osd-answer").count() == 2
        assert errors == []
