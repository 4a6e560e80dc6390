"""The page in a real browser: headless Chromium, driven by keyboard and looked at."""

import shutil

import numpy as np
import pytest
from waiting import LONG_S, wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra 'test'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

SAYS = """# Psalm
The **Lord** is *my* shepherd; `I shall` not want. <script>document.title = "bad"</script> [x](javascript:alert(1))

- green pastures
- still waters
  - deep ones

| a | b |
|---|---|
| 1 | 2 |

```python
print("amen")
```
"""


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, served):
    """The page, open and ready; it must not have asked anyone else for anything, nor reported an error."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page, problems = context.new_page(), []
    page.set_default_timeout(1e3 * LONG_S)
    page.on("pageerror", lambda error: problems.append(str(error)))
    # A request that the server refuses is an error to the browser; one test makes one.
    page.on("console", lambda m: m.type == "error" and "400" not in m.text and problems.append(m.text))
    page.on("request", lambda request: request.url.startswith(served.url) or problems.append(request.url))
    page.goto(served.url)
    page.wait_for_selector("#state.ready")
    yield page
    context.close()
    assert not problems


def ask(page, text):
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_a_chat_by_keyboard_alone(served, page):
    served.says = SAYS
    ask(page, "speak")
    page.wait_for_selector(".regenerate")
    answer = page.locator(".turn.assistant .text")
    assert answer.locator("h1").inner_text() == "Psalm" and answer.locator("strong").inner_text() == "Lord"
    assert answer.locator("li li").inner_text() == "deep ones" and answer.locator("td").all_inner_texts() == ["1", "2"]
    assert answer.locator("pre code").inner_text() == 'print("amen")'
    assert answer.locator("script").count() == 0 and answer.locator("a").count() == 0
    assert "<script>" in answer.inner_text() and page.title() == "glm-gpu"
    assert "tok/s" in page.locator(".turn.assistant .meta").inner_text()
    served.says = "another answer"
    page.focus(".regenerate")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant :text('another answer')")
    assert page.locator(".turn").count() == 2
    page.wait_for_selector(".regenerate")
    page.focus("#question")
    ask(page, "and again")
    page.wait_for_selector(":nth-match(.turn.assistant, 2) .regenerate")
    prompt = served.engine.tokenizer.decode(served._prompts[-1], special=True)
    assert prompt.index("speak") < prompt.index("another answer") < prompt.index("and again")


def test_escape_stops_an_answer_and_the_server_s_work(served, page):
    served.says, served.model.pass_s = "on and on " * 400, 0.05
    ask(page, "go")
    page.wait_for_selector(".turn.assistant :text('on and')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".meta :text('stopped')")
    assert served.idle()
    assert page.locator("#send").is_visible() and not page.locator("#stop").is_visible()


def test_reasoning_is_folded(served, page):
    served.says = "hidden reasons</think>shown words"
    page.check("#think")
    page.focus("#question")
    ask(page, "think")
    page.wait_for_selector(".regenerate")
    assert (
        not page.locator(".thoughts .body").is_visible()
        and page.locator(".assistant .text").inner_text() == "shown words"
    )
    page.focus(".thoughts summary")
    page.keyboard.press("Enter")
    assert page.locator(".thoughts .body").inner_text() == "hidden reasons"


def test_an_error_is_shown(served, page):
    page.click(".settings summary")
    page.fill("#temperature", "-1")
    page.keyboard.press("Escape")
    page.focus("#question")
    ask(page, "hi")
    page.wait_for_selector(".failure:has-text('temperature')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_live_view_shows_the_store_as_it_is(served, page, scheme, tmp_path):
    page.emulate_media(color_scheme=scheme)
    heat = served.engine.store.heat
    layers = sorted(served.engine.store.tier_map())
    heat.count(layers[0], np.array([[0, 1, 2, 3]] * 5), "decode")
    page.wait_for_selector("#legend li")
    assert page.locator("#map-size").inner_text() == f"{len(layers)} layers × 64"

    def shows_the_store():
        places = served.engine.store.tier_map()
        counts = {
            name: sum(int((p == code).sum()) for p in places.values())
            for code, name in enumerate(("disk", "ram", "locked"))
        }
        legend = dict(text.split() for text in page.locator("#legend li").all_inner_texts())
        colours = page.evaluate(
            """() => { const c = document.getElementById("map"), box = c.getContext("2d");
            const cell = (c.width - 24) / 64;
            return [...Array(64).keys()].map((x) => [...box.getImageData(24 + (x + 0.4) * cell, 8, 1, 1).data]); }"""
        )
        return (
            {name: int(number) for name, number in legend.items()} == {name: n for name, n in counts.items() if n}
            and all(
                (red > blue) == (place == 2)
                for (red, _, blue, _), place in zip(colours, places[layers[0]], strict=True)
            )
            and colours[0][3] > 240
            and min(alpha for *_, alpha in colours) < 80
        )

    wait_until(shows_the_store)
    page.focus("#map")
    page.keyboard.press("ArrowRight")
    assert page.locator("#cell").inner_text().startswith(f"Layer {layers[0]}, expert 0: in ")
    shot = page.screenshot(path=tmp_path / f"{scheme}.png")
    assert len(shot) > 20_000


def test_the_interface_is_described_without_anyone_else_s_help(served, http, page):
    page.goto(f"{served.url}/docs")
    page.wait_for_selector(".operation")
    schema = http.get("/openapi.json").json()
    shown = page.locator(".operation summary code").all_inner_texts()
    assert sorted(shown) == sorted(path for path, methods in schema["paths"].items() for _ in methods)
    page.click("summary:has-text('/v1/completions')")
    entry = page.locator(".operation[open]")
    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert entry.locator("table").first.locator("th").all_inner_texts() == list(fields)
    assert "list of integer" in entry.locator("tr:has(th:text-is('prompt')) .type").inner_text()
    assert f"curl {served.url}/v1/completions" in entry.locator("pre").inner_text()


def test_a_key_is_asked_for_and_kept_for_the_session(demo_context, browser):
    from server_fixtures import serve

    with serve(demo_context, api_key="a long secret") as locked:
        locked.says = "open"
        page = browser.new_page()
        page.goto(locked.url)
        page.wait_for_selector("#state:has-text('API key')")
        page.click(".settings summary")
        page.fill("#key", "a long secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#state.ready")
        page.reload()
        page.wait_for_selector("#state.ready")
        page.focus("#question")
        ask(page, "hi")
        page.wait_for_selector(".turn.assistant :text('open')")
        page.close()
