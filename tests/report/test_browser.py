"""The page in headless Chromium: curves, hover, zoom, axes, no requests, no foreign scripts."""

import base64
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.report.chromium import EXECUTABLE, NO_CHROMIUM, TIMEOUT, Chromium
from tests.report.synthetic import event, line_of, recipe_of, write_lines, write_run
from threefold.report.page import Watcher, Watching, new_server, render
from threefold.report.run_record import read_run

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason=NO_CHROMIUM)

BLUE, VERMILION = (0, 0x72, 0xB2), (0xD5, 0x5E, 0x00)  # of the first and the second run
COLOUR_TOLERANCE = 12  # of each channel
EVIL = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>$$x$$"
TIP = "document.getElementById('tip')"
DEEP_IMAGES = """(() => {
  let count = 0;
  const visit = (node) => {
    if (node.localName === "img") count += 1;
    if (node.shadowRoot) visit(node.shadowRoot);
    for (const child of node.children || []) visit(child);
  };
  visit(document.body);
  return count;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(autouse=True)
def nothing_wrong(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that the page requested nothing and had no errors."""
    browser: Chromium = request.getfixturevalue("browser")
    browser.requests.clear()
    browser.messages.clear()
    yield
    assert browser.messages == []
    requests = [url for url in browser.requests if not url.startswith(("data:", "blob:"))]
    local = ("file://", "http://127.0.0.1:")
    assert [url for url in requests if not url.startswith(local)] == []


def write_page(folder: Path, page: str) -> str:
    file = folder / "report.html"
    file.write_text(page)
    return file.as_uri()


def box(browser: Chromium, key: str) -> tuple[float, float, float, float]:
    """Scroll to a figure and return the left, top, width and height of its plot."""
    browser.value(f"document.getElementById('plot-{key}').scrollIntoView({{block: 'center'}})")
    found = browser.value(
        f"(() => {{ const r = document.getElementById('plot-{key}').getBoundingClientRect();"
        f" return [r.left, r.top, r.width, r.height]; }})()"
    )
    return tuple(found)  # type: ignore[return-value]


def column(browser: Chromium, step: float) -> float:
    """Return the distance of a step from the left edge of the wide figures."""
    return browser.value(
        f"Bokeh.index.get_one(Bokeh.documents.at(-1).roots()[0]).frame.x_scale.compute({step})"
    )


def pixels(browser: Chromium, key: str, colour: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Return the places of a colour in a figure, as (column, row) from its top left corner."""
    left, top, width, height = map(int, box(browser, key))
    browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    content = base64.b64decode(
        browser.send("Page.captureScreenshot", format="png", optimizeForSpeed=True)["data"]
    )
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture = picture.crop((left, top, left + width, top + height))
    near = np.abs(np.asarray(picture).astype(int) - colour).max(axis=2) <= COLOUR_TOLERANCE
    rows, columns = np.nonzero(near)
    return list(zip(columns.tolist(), rows.tolist(), strict=True))


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Return True once a condition is true, or False after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; figures are drawn a moment after a change."""
    assert within(TIMEOUT, condition)


def x_range(browser: Chromium) -> list[float]:
    return browser.value(
        "(({x_range}) => [x_range.start, x_range.end])(Bokeh.documents.at(-1).roots()[0])"
    )


def test_the_page_of_one_run(browser: Chromium, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line |= {"validation_loss": line["loss"] + 0.1} if line["step"] % 10 == 0 else {}

    events = [event("save", 50, checkpoint="step-0000050"), event("resume", 60)]
    run = write_run(tmp_path / "run", events=events, change=change)
    browser.open(write_page(tmp_path, render([read_run(run, "run")])))
    assert len(browser.requests) >= 1  # the requests are recorded

    # Curves: each figure has pixels of its run over most of its width.
    keys = browser.value("Object.values(JSON.parse(settings.textContent).roots)")
    assert "plot-loss" in keys and "plot-events" in keys
    for key in keys:
        found = pixels(browser, key.removeprefix("plot-"), BLUE)
        columns = [x for x, _ in found]
        if key != "plot-events":
            assert max(columns) - min(columns) > 300, key
    assert pixels(browser, "loss", VERMILION)  # the validation loss

    # Hover: the values of the step under the mouse.
    left, top, width, height = box(browser, "loss")
    browser.mouse("Moved", left + column(browser, 52.3), top + height / 2)
    browser.wait_for(f"!{TIP}.hidden")
    text = browser.value(f"{TIP}.innerText")
    assert text.startswith("step 52\n")
    assert f"loss: {line_of(recipe_of(), 52)['loss']:.5g}\n" in text
    expected = f"validation_loss: {line_of(recipe_of(), 50)['loss'] + 0.1:.5g} step 50"
    assert text.endswith(expected)
    browser.mouse("Moved", left + column(browser, 50.1), top + height / 2)
    browser.wait_for(f"{TIP}.innerText.endsWith('save: step-0000050')")
    browser.mouse("Moved", left + width / 2, 5)
    browser.wait_for(f"{TIP}.hidden")

    # Zoom: a drag zooms all figures, and the button resets them.
    whole = x_range(browser)
    before = pixels(browser, "rate", BLUE)
    left, top, width, height = box(browser, "loss")
    start, end = (left + 0.3 * width, top + 0.2 * height), (left + 0.6 * width, top + 0.7 * height)
    for _ in range(5):  # a mouse that rests for 0.25 s on a busy machine does not begin a drag
        browser.drag(start, end)
        if within(5.0, lambda: x_range(browser) != whole):
            break
    start, end = x_range(browser)
    assert whole[0] < start < end < whole[1]
    assert end - start < 0.5 * (whole[1] - whole[0])
    eventually(lambda: pixels(browser, "rate", BLUE) != before)
    browser.value("document.getElementById('reset').click()")
    eventually(lambda: x_range(browser) == whole)


def test_the_page_of_a_comparison(browser: Chromium, tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", range(1, 101))
    wide = recipe_of("batch.global_sequences=64", "model.layers=8")
    second = write_run(tmp_path / "second", range(1, 101), recipe=wide,
                       change=lambda line: line.update(loss=line["loss"] + 1))  # fmt: skip
    page = render([read_run(first, "first"), read_run(second, "second")])
    browser.open(write_page(tmp_path, page))

    def reach(colour: tuple[int, int, int]) -> int:
        return max(x for x, _ in pixels(browser, "loss", colour))

    # By step both runs end at the same place; the second has read twice the tokens.
    assert abs(reach(BLUE) - reach(VERMILION)) < 12
    lengths = {}
    for axis in ("tokens", "flops"):
        before = reach(BLUE)
        browser.value(f"document.querySelector('input[value={axis}]').click()")
        eventually(lambda before=before: reach(BLUE) < before - 20)  # type: ignore[misc]
        zero = min(x for x, _ in pixels(browser, "loss", BLUE))
        lengths[axis] = (reach(VERMILION) - zero) / (reach(BLUE) - zero)
        label = browser.value("Bokeh.documents.at(-1).roots()[0].below[0].axis_label")
        assert label.startswith({"tokens": "tokens (", "flops": "training compute ("}[axis])
    assert lengths["tokens"] == pytest.approx(2, rel=0.1)
    assert lengths["flops"] > 2.5

    # A run can be hidden.
    browser.value("document.querySelectorAll('input.run')[1].click()")
    eventually(lambda: not pixels(browser, "loss", VERMILION))
    assert pixels(browser, "loss", BLUE)


def test_text_of_users_is_shown_as_text(browser: Chromium, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line |= {f"validation/{EVIL}": 1.0, f"tasks/{EVIL}": 0.5, EVIL: 1.0}

    events = [event("warning", 50, message=EVIL)]
    run = write_run(tmp_path / "run", events=events, change=change)
    other = write_run(tmp_path / "other", change=change)
    browser.open(write_page(tmp_path, render([read_run(run, EVIL), read_run(other, f"2{EVIL}")])))
    for key in ("events", "validation", "tasks", "other-0"):
        left, top, width, height = box(browser, key)
        at = column(browser, 50) if key == "events" else width / 2
        browser.mouse("Moved", left + at, top + height / 3)
        browser.wait_for(f"{TIP}.innerText.includes('<img')")  # the name or reason, as text
    assert browser.value("window.hacked === undefined")
    assert browser.value(DEEP_IMAGES) == 0


@pytest.mark.long
def test_a_watched_page_reloads_when_the_run_grows(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", range(1, 11))

    def generate(version: str) -> str:
        return render([read_run(run, "run")], watching=Watching(version, 0.1))

    server = new_server(Watcher([run], generate), 0)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        assert "10 of 200" in browser.value("document.body.textContent")
        browser.value("document.querySelector('input[value=tokens]').click()")
        write_lines(run / "metrics.jsonl", [line_of(recipe_of(), step) for step in range(1, 31)])
        browser.wait_for("document.body && document.body.textContent.includes('30 of 200')")
        browser.wait_for("document.body.dataset.ready === 'yes'")
        assert browser.value("document.querySelector('input[value=tokens]').checked")
    finally:
        browser.send("Page.navigate", url="about:blank")
        server.shutdown()
        server.server_close()
