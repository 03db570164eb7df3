"""The page: complete, escaped, self-contained, small and fast."""

import base64
import gzip
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.commands import run_here
from tests.report.synthetic import event, line_of, recipe_of, write_lines, write_run
from threefold.commands.report import main
from threefold.config.loading import REPOSITORY
from threefold.report.charts import panels_of
from threefold.report.page import Watching, bokeh_script, plan_rows, render
from threefold.report.run_record import read_run

MAX_BYTES = 5_000_000
MAX_BYTES_OF_ONE_RUN = 1_000_000  # without Bokeh's script
MAX_TIMES_OF_JSON = 8.0  # of the time of parsing the lines of the metrics
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>$$x$$'


class Page(HTMLParser):
    """The elements and the visible text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.data: dict[str, Any] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = (dict(attrs).get("id") or tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data
        elif self._inside in ("figures-data", "settings"):
            self.data[self._inside] = json.loads(data)


def own_part(page: str) -> str:
    """Return the page without Bokeh's script, whose source names other sites."""
    return page.replace(bokeh_script(), "")


@pytest.fixture(scope="module")
def page_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    return render([read_run(folder, folder.name)])


def titles(page: str) -> list[str]:
    return re.findall(r"<figcaption><b>(.*?)</b>", page)


def test_a_page_has_every_part(tmp_path: Path) -> None:
    events = [
        event("resume", 40, changed={"layout.tensor": [1, 2]}),
        event("skip", 50, reason="the loss is nan", samples=[1600, 1631]),
        event("rollback", 60, to=50, samples=1920, reason="the loss is 9.1"),
        event("attempt", 50, number=2, reason="node lost", layout="pipeline 2", nodes=["a"]),
        event("slow", 80, ranks=[1], nodes=["b"], ratio=2.5),
        event("save", 100, checkpoint="/runs/x/checkpoints/step-0000100"),
        event("stop", 100, reason="SIGTERM", exit_code=5),
    ]

    def change(line: dict) -> None:
        if line["step"] % 10 == 0:
            line |= {"validation_loss": 3.1, "validation/code/loss": 2.0, "tasks/piqa": 0.6}
            line |= {"validation/code/bits_per_byte": 1.1, "slowest_rank": 1, "slowest_ratio": 1.2}
        line["something_new"] = line["step"]

    run = write_run(tmp_path / "run", events=events, change=change)
    (run / "timeline.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    page = render([read_run(run, "run")])
    assert titles(page) == [
        "Training loss", "Events", "Validation loss", "Validation, bits per byte", "Task scores",
        "Learning rate", "Gradient norm", "Throughput", "Model FLOPs per second", "Step time",
        "Peak memory of rank 0", "Time outside the passes", "Slowest rank", "something_new",
    ]  # fmt: skip
    parsed = Page(page)
    for text in (
        "stopped", "100 of 200", "No prediction: the run is on a CPU",
        "kept steps", "SIGTERM", "data/books/train", "25.00%", "10 of 10",
        "ranks 1 on b take 2.5 times", "resolved recipe of run", "8 events of run",
        "validation/code/bits_per_byte", "to step 50: the loss is 9.1", "layout.tensor: 1 -> 2",
    ):  # fmt: skip
        assert text in parsed.text, text
    assert any(
        (attributes.get("src") or "").startswith("data:image/svg") for _, attributes in parsed.tags
    )
    figures = json.dumps(parsed.data["figures-data"])
    for kind in ("resume", "skip", "rollback", "re-plan", "slow ranks", "save", "stop"):
        assert f'"{kind}"' in figures, kind
    assert set(parsed.data["settings"]["axes"]) == {"step", "tokens", "flops"}


def test_a_comparison_shows_the_differences_of_the_recipes(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", recipe=recipe_of())
    second = write_run(tmp_path / "second", recipe=recipe_of("optimizer.learning_rate=1e-3",
                                                             "model.layers=8"))  # fmt: skip
    runs = [read_run(path, path.name) for path in (first, second)]
    page = render(runs)
    rows = re.findall(r"<tr><th><code>(.*?)</code></th><td><code>(.*?)</code></td>"
                      r"<td><code>(.*?)</code></td>", page)  # fmt: skip
    assert ("optimizer.learning_rate", "0.004", "0.001") in rows
    assert ("model.layers", "4", "8") in rows
    assert len(rows) == 2
    assert runs[0].flops_per_token != runs[1].flops_per_token
    assert "The recipes are equal." in render([runs[0], read_run(first, "again")])


def test_the_plan_is_shown_and_drawn(tmp_path: Path, page_of_a_run: str) -> None:
    record = read_run(write_run(tmp_path / "run"), "run")
    page = Page(render([record], gpu="cpu"))
    assert "Planned for 2 ranks on cpu" in page.text
    assert "seconds per step" in page.text and "plan: " in page.text
    assert "plan: " not in Page(page_of_a_run).text


def test_the_difference_is_positive_for_more_than_planned(tmp_path: Path) -> None:
    record = read_run(write_run(tmp_path / "run"), "run")
    seconds = record.steps.median("step_seconds")
    assert seconds is not None
    others = {"tokens_per_second": 1.0, "tflops_per_gpu": 1.0, "mfu": 0.5, "memory_gb": 1.0}
    planned: Any = SimpleNamespace(step_seconds=seconds / 1.25, **others)
    differences = {row[0]: row[-1] for row in plan_rows(record, planned)}
    assert differences["seconds per step"] == "+25.0%"


def test_text_of_users_is_never_markup(tmp_path: Path) -> None:
    recipe = recipe_of(f"tracking.tags={json.dumps([EVIL])}")
    events = [
        event("rollback", 60, to=50, samples=1920, reason=EVIL),
        event("warning", 60, message=EVIL),
        event("stop", 70, reason=EVIL, exit_code=5),
        event(EVIL, 71, reason=EVIL),
        event("start", 0, code_version=EVIL),
        event("slow", 80, ranks=[EVIL], nodes=[EVIL], ratio=EVIL),
    ]

    def change(line: dict) -> None:
        line |= {f"validation/{EVIL}": 1.0, f"tasks/{EVIL}": 0.5, EVIL: 1.0}

    run = write_run(tmp_path / "run", recipe=recipe, events=events, change=change)
    other = write_run(tmp_path / "other")
    (other / "recipe.toml").write_text(f"name = '''{EVIL}'''\n")
    records = [read_run(run, EVIL), read_run(other, f"2{EVIL}")]
    parsed = Page(render(records, watching=Watching("1", 5.0)))
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert [script.get("type") for script in scripts] == ["application/json"] * 2 + [None] * 2
    assert not [tag for tag, _ in parsed.tags if tag == "img"]
    assert not [name for _, attributes in parsed.tags for name in attributes
                if name.startswith("on")]  # fmt: skip
    assert EVIL in parsed.text


def test_the_policy_allows_only_the_scripts_of_the_page(page_of_a_run: str) -> None:
    page = Page(page_of_a_run)
    policy = next(attributes["content"] for tag, attributes in page.tags
                  if attributes.get("http-equiv") == "Content-Security-Policy")  # fmt: skip
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_the_page_names_no_other_site(page_of_a_run: str) -> None:
    page = own_part(page_of_a_run)
    assert re.findall(r"https?://[^\s\"'<)]+", page) == []
    loads = [
        value
        for _, attributes in Page(page).tags
        for name, value in attributes.items()
        if name in ("src", "href", "data", "action") and not (value or "").startswith("data:")
    ]
    assert loads == []


def test_a_page_without_metrics_or_recipe_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("")
    page = Page(render([read_run(folder, "run")]))
    assert "metrics.jsonl does not exist" in page.text
    assert "There are no metrics to draw yet." in page.text


def test_metrics_are_found_by_their_prefix(tmp_path: Path) -> None:
    def change(line: dict) -> None:
        line |= {"validation_loss_books": 1.0, "validation/a/b": 2.0, "tasks/x/y": 0.5}
        line |= {"expert_entropy": 3.0, "validation_position_losses": [2.0, 1.0]}
        line |= {"tasks/x/perplexity": 3e3, "tasks/x/bits_per_byte": 1.5}
        line |= {"validation/a/position_losses": [4.0]}

    record = read_run(write_run(tmp_path / "run", change=change), "run")
    panels = {panel.title: list(panel.metrics) for panel in panels_of([record], {})}
    assert panels["Validation loss"] == ["validation_loss_books", "validation/a/b"]
    assert panels["Task scores"] == ["tasks/x/y"]
    assert panels["Tasks, perplexity"] == ["tasks/x/perplexity"]
    assert panels["Tasks, bits per byte"] == ["tasks/x/bits_per_byte"]
    assert panels["Validation loss by position"] == [
        "validation_position_losses/1",
        "validation_position_losses/2",
        "validation/a/position_losses/1",
    ]
    assert panels["expert_entropy"] == ["expert_entropy"]


def test_a_line_belongs_to_the_runs_that_have_it(tmp_path: Path) -> None:
    def runs_of(*clippings: float) -> list[Any]:
        found = []
        for number, clipping in enumerate(clippings):
            recipe = recipe_of(f"optimizer.gradient_clipping={clipping}")
            name = f"{number} of {clippings}"
            found.append(read_run(write_run(tmp_path / name, recipe=recipe), name))
        return found

    def lines(runs: list[Any], key: str, plans: dict[int, Any]) -> list[int | None]:
        (panel,) = (each for each in panels_of(runs, plans) if each.key == key)
        return [each.run for each in panel.references]

    equal = runs_of(1.0, 1.0)
    assert lines(equal, "norm", {}) == [None]
    assert lines(runs_of(1.0, 0.5), "norm", {}) == [0, 1]
    planned = SimpleNamespace(step_seconds=2.0, tokens_per_second=1.0, memory_gb=1.0, mfu=0.5,
                              tflops_per_gpu=1.0)  # fmt: skip
    assert lines(equal, "step", {1: planned}) == [1]  # only this run has a prediction
    assert lines(equal, "step", {0: planned, 1: planned}) == [None]


def test_runs_without_an_mfu_are_compared_by_tflops(tmp_path: Path) -> None:
    (without, known) = (read_run(write_run(tmp_path / name), name) for name in ("cpu", "gpu"))
    known.steps.values["mfu"] = known.steps.values["tflops_per_gpu"] / 100

    def keys(*runs: Any) -> dict[str, str]:
        found = {each.key: each.note for each in panels_of(runs, {})}
        return {key: found[key] for key in ("mfu", "tflops") if key in found}

    assert keys(known) == {"mfu": ""}
    assert keys(without) == {"tflops": "no MFU: the peak of the device is not known"}
    assert keys(known, without) == {
        "mfu": "", "tflops": "no MFU of cpu: the peak of the device is not known"
    }  # fmt: skip


def write_long_run(folder: Path, steps: int) -> Path:
    """Write a run of many steps, with a spike of a single step."""
    recipe = recipe_of(steps=steps)
    lines = []
    for step in range(1, steps + 1):
        line = line_of(recipe, step)
        line |= {"loss": 99.0} if step == 7777 else {}
        line |= {"validation_loss": 3.0, "tasks/piqa": 0.5} if step % 100 == 0 else {}
        lines.append(line)
    events = [event("save", step, step) for step in range(500, steps + 1, 500)]
    write_run(folder, [], recipe=recipe, events=events)
    write_lines(folder / "metrics.jsonl", lines)
    return folder


@pytest.mark.long
def test_a_page_does_not_grow_with_the_run(tmp_path: Path) -> None:
    page = render([read_run(write_long_run(tmp_path / "run", 12_000), "run")])
    assert len(own_part(page)) < MAX_BYTES_OF_ONE_RUN
    assert 99.0 in largest_heights(Page(page).data["figures-data"])  # the spike of a single step


@pytest.mark.long
def test_a_long_run_gives_a_small_page_quickly(tmp_path: Path) -> None:
    folders = [write_long_run(tmp_path / name, 100_000) for name in "ab"]
    before = time.process_time()
    page = render([read_run(folder, folder.name) for folder in folders])
    rendered = time.process_time()
    for folder in folders:
        for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
            json.loads(line)
    parsed = time.process_time()
    assert len(page.encode()) < MAX_BYTES
    assert rendered - before < MAX_TIMES_OF_JSON * (parsed - rendered)
    document = Page(page).data["figures-data"]
    assert 99.0 in largest_heights(document)  # the spike of a single step


def largest_heights(document: dict[str, Any]) -> set[float]:
    """Return the largest value of each curve in the data of a page."""
    found: set[float] = set()

    def visit(value: Any, key: str = "") -> None:
        if isinstance(value, list):
            for each in value:
                if isinstance(each, list) and len(each) == 2 and each[0] == "y":
                    visit(each[1], "y")
                else:
                    visit(each)
        elif isinstance(value, dict):
            if key == "y" and value.get("type") == "ndarray":
                content = gzip.decompress(base64.b64decode(value["array"]["data"]))
                found.add(float(np.nanmax(np.frombuffer(content, value["dtype"]))))
            else:
                for name, each in value.items():
                    visit(each, name)

    visit(document)
    return found


def test_the_command_writes_the_page_without_torch(tmp_path: Path) -> None:
    run, output = write_run(tmp_path / "run"), tmp_path / "new" / "report.html"
    code = (
        "import sys; from threefold.commands.report import main; main();"
        "print({'torch', 'deepspeed'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "--output", str(output.with_suffix(""))],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size = output.stat().st_size / 1e6
    assert done.stdout == f"wrote {output} ({size:.1f} MB)\nset()\n"
    assert titles(output.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/missing"], "missing does not exist; use for example "),
        (["{tmp}"], "is not a run folder"),
        (["{tmp}/run", "{tmp}/run"], "is given twice; name each run once"),
        (["{tmp}/run", "--gpu", "Z9"], 'gpu = "Z9" is not known; use one of'),
        (["{tmp}/run", "--output", "{tmp}"], "is a folder; use a file in it, such as "),
        (["{tmp}/run", "--output", "."], "--output . is a folder; use a file in it"),
        (["{tmp}/run", "--output", "/"], "such as /report.html"),
        (["{tmp}/run", "--output", "{tmp}/run/recipe.toml/x"], "cannot be "),
        (["{tmp}/run", "--every", "10"], "--every requires --watch"),
        (["{tmp}/run", "--port", "0"], "--port requires --watch"),
        ([f"{{tmp}}/{number}" for number in range(40)], "40 runs are too many to tell apart"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_a_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    write_run(tmp_path / "run", range(1, 4))
    done = run_here(main, *(each.replace("{tmp}", str(tmp_path)) for each in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith("report.py: ") and message in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_only_an_earlier_report_is_replaced(tmp_path: Path) -> None:
    run, report = write_run(tmp_path / "run", range(1, 4)), tmp_path / "report.html"
    report.touch()
    for _ in range(2):
        assert run_here(main, run, "--output", report).returncode == 0
    page = report.read_text()
    other = tmp_path / "other.html"
    other.write_text("<!doctype html>\n<title>mine</title>\n")
    for file in (run / "metrics.jsonl", other):
        before = file.read_bytes()
        done = run_here(main, run, "--output", file)
        assert done.returncode == 2
        assert f"--output {file} already exists and is not a report; use" in done.stderr
        assert file.read_bytes() == before
    assert report.read_text() == page and not list(tmp_path.rglob("*.incomplete"))


def test_a_run_without_a_complete_step_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = write_run(tmp_path / "run", ()), tmp_path / "report.html"
    (run / "metrics.jsonl").write_text('{"step": 1, "lo')
    whole = write_run(tmp_path / "whole", range(1, 4))
    monkeypatch.setattr(sys, "argv", ["report.py", str(run), str(whole), "--output", str(output)])
    main()
    warning = f"warning: {run / 'metrics.jsonl'} has no complete step yet; the report has no curves"
    assert capsys.readouterr().err == f"{warning} of this run\n" and output.exists()
