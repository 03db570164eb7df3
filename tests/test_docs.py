"""README, docs/ and BENCHMARKS.md are correct: links, paths, commands, outputs, keys, numbers."""

import contextlib
import functools
import http.server
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from models.cost import parameter_count
from tests.commands import run_here
from tests.conftest import each_in_turn, shipped_configs
from tests.ranks import run_ranks
from tests.report.chromium import EXECUTABLE, NO_CHROMIUM, Chromium
from threefold.commands import plan, prove
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.plan import catalogue
from threefold.plan.catalogue import ZERO_STAGE_HEADER, ZERO_STAGE_ROWS
from threefold.plan.recipe_reference import reference
from threefold.runtime import output

MAX_README_LINES = 200
DOCS = {path.name: path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md"))}
README = (REPOSITORY / "README.md").read_text()
BENCHMARKS = (REPOSITORY / "BENCHMARKS.md").read_text()
AGENTS = (REPOSITORY / "AGENTS.md").read_text()
PAGES = {
    "README.md": README,
    "BENCHMARKS.md": BENCHMARKS,
    "AGENTS.md": AGENTS,
    **{f"docs/{name}": text for name, text in DOCS.items()},
}
CREATED_BY_EXAMPLES = {f"recipes/{name}.toml" for name in ("mine", "7b-planned", "13b-planned")}
SOURCE_FOLDERS = (
    "recipes",
    "models",
    "threefold",
    "ds_configs",
    "slurm",
    "benchmarks",
    "tests",
    "docs",
)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of the fenced blocks of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> Iterator[str]:
    """Yield the inline code of a page, each on one line."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", prose):
        yield " ".join(span.split())


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page: lines of blocks without output, and inline code."""
    for language, content in blocks(text):
        if language in ("", "bash") and not content.startswith(("$", *SOURCE_FOLDERS)):
            lines = content.replace("\\\n", "").splitlines()
            lines = [line.partition("  #")[0].strip() for line in lines]
            yield from (line for line in lines if not line.startswith("#"))
    for span in spans(text):
        if re.match(r"(python|make|deepspeed --\S+|slurm/\S+|sbatch) \S", span):
            yield span


def prose_without_code(text: str) -> str:
    """Return a page without its blocks and inline code."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "", prose)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links() -> Iterator[tuple[str, str]]:
    """Yield each page with each relative link in it."""
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)]+)\)", prose):
            if "://" not in target:
                yield page, target


SHOWN = [  # commands with their output
    content for text in PAGES.values() for _, content in blocks(text) if content.startswith("$")
]
COMMANDS = sorted({command for text in PAGES.values() for command in commands(text)})
TREE = next(content for _, content in blocks(README) if content.startswith("recipes/"))


def test_relative_links_resolve() -> None:
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / page).parent / path if path else REPOSITORY / page
        assert file.exists(), (page, target)
        if anchor:
            assert anchor in anchors(file.read_text()), (page, target)


def test_the_readme_links_every_page() -> None:
    assert [name for name in DOCS if f"](docs/{name})" not in README] == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


def test_paths_in_inline_code_exist() -> None:
    path = rf"({'|'.join(SOURCE_FOLDERS)})/[\w./*-]*"
    for page, text in PAGES.items():
        paths = {span for span in spans(text) if re.fullmatch(path, span)}
        missing = {span for span in paths if not list(REPOSITORY.glob(span.replace("NAME", "*")))}
        assert missing <= CREATED_BY_EXAMPLES, page


def test_constants_are_in_the_files_that_are_named_with_them() -> None:
    for page, text in PAGES.items():
        named = re.findall(r"`([A-Z][A-Z_]{3,})`\s\(`([\w/]+\.py)`\)", text)
        named += re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)
        for name, file in named:
            source = (REPOSITORY / file).read_text()
            assert re.search(rf"^(class |def )?{name}\b", source, re.MULTILINE), (page, name, file)


def test_recipe_keys_in_inline_code_exist() -> None:
    schema = Recipe.model_json_schema()
    sections = {
        name: schema["$defs"][name.capitalize() if name != "model" else "ModelConfig"]
        for name in schema["properties"]
        if name not in ("name", "seed", "deepspeed")
    }
    for page, text in PAGES.items():
        keys = [span.split(" ")[0].split(".") for span in spans(text)]
        assert [
            key
            for key in keys
            if key[0] in sections
            and len(key) == 2
            and key[1] not in ("py", *sections[key[0]]["properties"])  # layout.py is a file
        ] == [], page


def tree_entries() -> dict[str, set[str]]:
    """Return the entries of each folder in the README's tree; "" is the repository."""
    entries: dict[str, set[str]] = {"": set()}
    folder = ""
    for line in TREE.splitlines():
        names = re.split(r"  +", line.strip())[0].split()
        if not line.startswith(" "):
            folder = names[0].removesuffix("/")
            entries[""].add(folder)
        else:
            entries.setdefault(folder, set()).update(name.removesuffix("/") for name in names)
    return entries


def tracked_entries(folder: str) -> set[str]:
    """Return the files and folders of a folder that belong to the repository."""
    path = REPOSITORY / folder
    done = subprocess.run(
        ["git", "ls-files", "--cached", "."],  # a user may have added recipes
        cwd=path,
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name for name in done.stdout.splitlines() if (path / name).exists()}
    return {name.partition("/")[0] for name in names} - {"__init__.py"}


def test_the_tree_equals_the_folders() -> None:
    entries = tree_entries()
    top = {name for name in tracked_entries("") if (REPOSITORY / name).is_dir()}
    assert entries.pop("") == {name for name in top if not name.startswith(".")}
    for folder, names in entries.items():
        assert names == tracked_entries(folder), folder


def print_usages() -> dict[str, str]:
    """Return the help text of every script, and of every subcommand, that a command names."""
    usages = {}
    for program in sorted({program_of(shlex.split(command)) for command in COMMANDS} - {""}):
        script, *subcommand = program.split()
        sys.argv = [script, *subcommand, "--help"]
        sys.path[0] = os.path.dirname(script)
        with (
            mock.patch.object(output, "use_nonblocking_output"),  # which replaces sys.stdout
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.suppress(SystemExit),
        ):
            runpy.run_path(script, run_name="__main__")
        usages[program] = printed.getvalue()
    return usages


def program_of(words: list[str]) -> str:
    """Return the script of a command line and its subcommand, if it has one; "" without a script.

    The first word after a script is a subcommand if it is neither a path nor an option.
    """
    script = next((word for word in words if word.endswith(".py") and "/" in word), "")
    after = words[words.index(script) + 1 :] if script else []
    return f"{script} {after[0]}" if after and re.fullmatch(r"[a-z][a-z-]+", after[0]) else script


def test_commands_name_existing_files_and_options() -> None:
    (usages,) = run_ranks(1, print_usages)
    makefile = (REPOSITORY / "Makefile").read_text()
    for command in COMMANDS:
        words = [word.strip("()") for word in shlex.split(command)]
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), command
        for word in words:
            if word.startswith(tuple(f"{folder}/" for folder in SOURCE_FOLDERS)):
                assert word in CREATED_BY_EXAMPLES or (REPOSITORY / word).exists(), command
        if "-m" in words:
            module = words[words.index("-m") + 1].replace(".", "/")
            files = [REPOSITORY / f"{module}{end}" for end in (".py", "/__main__.py")]
            assert any(file.exists() for file in files), command
        script = next((word for word in words if word.endswith(".py")), None)
        if script:
            after = words[words.index(script) + 1 :]
            for option in (word for word in after if word.startswith("--")):
                assert option in usages[program_of(words)], command


def test_a_file_without_a_folder_is_next_to_the_one_before_it() -> None:
    """The table of AGENTS.md names a file, and then others of its folder by their names alone."""
    for row in re.findall(r"^\|.*", AGENTS, re.MULTILINE):
        folder = REPOSITORY
        for path in re.findall(r"`([\w./-]+(?:/|\.\w+))`", row):
            if (full := REPOSITORY / path).exists():
                folder = full if full.is_dir() else full.parent
            else:
                assert "NAME" in path or (folder / path).exists(), (row, path)


@pytest.mark.parametrize(
    "command", [words for _, text in blocks(AGENTS) for words in commands(f"```\n{text}```\n")]
)
def test_the_commands_for_agents_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """plan.py answers, make knows its targets, and prove.py, which takes minutes, its options."""
    program, script, *options = shlex.split(command)
    if program == "make":
        make = ["make", "--dry-run", script, *options]
        assert subprocess.run(make, cwd=REPOSITORY, capture_output=True).returncode == 0
        tests = [word.partition("=")[2] for word in options if word.startswith("ARGS=")]
        assert all((REPOSITORY / folder).is_dir() for folder in tests)
    elif script == "recipes/plan.py":
        done = run_here(plan.main, *options)
        assert (done.returncode, done.stderr) == (0, "") and "GPU" in done.stdout
    else:
        assert (program, script) == (".venv/bin/python", "recipes/prove.py")
        monkeypatch.setattr(sys, "argv", [script, *options])
        parsed = prove.parse_command_line()
        assert load_recipe(parsed.recipe).name == "tiny" and parsed.ranks == 4


def marks_of_shown(text: str) -> list[pytest.MarkDecorator]:
    """Return the marks of the test of a command: some search or simulate for seconds."""
    takes_long = re.search(r"plan.py largest|llama/70b|communication_slots|llama/13b", text)
    return [pytest.mark.long] if takes_long else []


@pytest.mark.parametrize("text", [pytest.param(text, marks=marks_of_shown(text)) for text in SHOWN])
def test_a_shown_command_prints_the_shown_output(text: str) -> None:
    command, expected = text.removeprefix("$ ").split("\n", 1)
    python, script, *options = shlex.split(command)
    assert python == "python"
    if script == "recipes/plan.py":
        done = run_here(plan.main, *options)
    else:
        done = subprocess.run(
            [sys.executable, script, *options], cwd=REPOSITORY, capture_output=True, text=True
        )
    assert done.stdout + done.stderr == expected


def test_code_and_links_are_closed() -> None:
    """A backtick or a bracket without its partner would hide text from the other tests."""
    for page, text in PAGES.items():
        prose = prose_without_code(text)
        assert "`" not in prose, page
        assert "](" not in re.sub(r"\[[^\]]*\]\([^)]*\)", "", prose), page


def test_the_default_model_is_as_large_as_stated() -> None:
    count = parameter_count(load_recipe(DEFAULT_RECIPE).model)
    assert f"{count / 1e6:.1f} M parameter" in README


def test_every_deepspeed_config_is_explained() -> None:
    for path in shipped_configs():
        assert f"`{path.name}`" in DOCS["zero-and-precision.md"]


def test_every_package_is_explained() -> None:
    for path in (REPOSITORY / "threefold").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            assert f"| `{path.name}/` |" in DOCS["architecture.md"]
            assert f" {path.name}/" in README


def test_the_proofs_are_counted_right() -> None:
    from tests.config.test_schema import BAD
    from tests.engine.test_layouts import QUICK_KEYS, ROWS
    from tests.plan.test_catalogue import COPIES

    page = " ".join(DOCS["testing.md"].split())
    assert f"in {len(ROWS)} layouts" in page
    assert f"({len(QUICK_KEYS)} of them in `make test`" in page
    assert len(BAD) > 50 and "More than 50 bad recipes" in page
    assert f"small copies of {len(COPIES)} recipes" in " ".join(DOCS["catalogue.md"].split())


def test_the_results_at_a_glance_are_those_of_the_pages() -> None:
    def layouts(page: str, head: str) -> int:
        table = DOCS[page].partition(head)[2].partition("\n\n")[0]
        return sum(int(row.split("|")[3]) for row in table.splitlines()[2:])

    axes = "| tensor x pipeline x data | ranks | layouts |"
    proven = layouts("layout-equivalence.md", axes)
    relayed = layouts("checkpoints.md", axes)
    readme = " ".join(README.split())
    assert f"In all {proven} layouts" in readme and f"{proven} of {proven}" in readme
    assert f"{relayed} of {relayed}" in readme
    for ratios in re.findall(r"\d\.\d\d / \d\.\d\d", readme):
        assert ratios in DOCS["performance.md"]


@pytest.mark.parametrize(
    "rows",
    each_in_turn([[row] for row in ZERO_STAGE_ROWS], [[ZERO_STAGE_ROWS[0]]]),
    ids=lambda rows: f"{rows[0][1]} on {rows[0][0]} GPUs",
)
def test_the_catalogue_is_the_planners(
    rows: Sequence[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ZERO_STAGE_ROWS", rows)
    recipes, stages = run_here(plan.main, "catalogue").stdout.split("\n\n")
    assert recipes.count("\n") > 25 and recipes in DOCS["catalogue.md"]
    header = "\n".join(ZERO_STAGE_HEADER)
    assert stages.startswith(header) and stages.count("\n") == header.count("\n") + len(rows) + 1
    for line in stages.splitlines():
        assert f"{line}\n" in DOCS["catalogue.md"], line


def test_the_recipe_reference_is_current() -> None:
    assert DOCS["recipe-reference.md"] == reference()
    assert " or null" not in reference()  # not a value of TOML


def test_every_recipe_key_has_a_meaning() -> None:
    rows = [row for row in reference().splitlines() if row.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_errors_by_group_are_those_shown() -> None:
    table = "benchmarks/planner_accuracy/stacks_2026.csv"
    lines = run_here(plan.main, "table", table, "--groups").stdout.splitlines()
    assert len(lines) > 20 and "\n".join(lines) in DOCS["planner.md"]


def test_the_errors_of_published_tables_are_those_shown() -> None:
    done = run_here(plan.main, "table", "benchmarks/planner_accuracy", "--json")
    page = DOCS["planner.md"]
    shown = [
        line.split("|")[2:6] for line in page.splitlines() if re.match(r"\| \w.*A100 \|", line)
    ]
    tables = json.loads(done.stdout)
    for name in ("narayanan2021", "korthikanti2022", "megascale2024"):
        summary = tables[name]["summary"]
        cells = [
            f" {summary['compared']} ",
            f" {summary['mean_absolute_error_percent']:.1f} ",
            f" {summary['max_absolute_error_percent']:.1f} ",
            f" {summary['bias_percent']:+.1f} ",
        ]
        assert cells in shown, name


def test_the_answers_are_commands_that_load() -> None:
    page = PAGES["docs/answers.md"]
    assert len(set(re.findall(r"github\.com/\S+/issues/\d+", page))) >= 20
    starts = ("python recipes/", "deepspeed --num_gpus ")
    answers = [shlex.split(span) for span in spans(page) if span.startswith(starts)]
    assert len(answers) >= 20
    for words in answers:
        recipes = [word for word in words if word.endswith(".toml")]
        overrides = [value for option, value in pairwise(words) if option == "--set"]
        for recipe in set(recipes) - CREATED_BY_EXAMPLES:
            loaded = load_recipe(REPOSITORY / recipe, overrides)
            if words[0] == "deepspeed":
                assert int(words[2]) % loaded.layout.ranks_per_data_rank == 0, words


def test_lists_are_those_of_markdown_for_the_site_too() -> None:
    """GitHub needs two spaces to continue an item after an empty line, Python-Markdown four."""
    for page, text in PAGES.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert re.findall(r"\n\n {1,3}\S.*|\n {1,3}(?:-|\d+\.) .*", prose) == [], page


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The URL of the built site."""
    subprocess.run(["make", "site", "ARGS="], cwd=REPOSITORY, check=True)
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=REPOSITORY / ".site" / "html"
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.long
@pytest.mark.skipif(EXECUTABLE is None, reason=NO_CHROMIUM)
def test_the_site_is_searched_and_read_in_a_browser(site: str, tmp_path: Path) -> None:
    loaded = "document.readyState === 'complete' && window.__md_scope"
    result = "document.querySelectorAll('.md-search-result__link')"
    with Chromium(tmp_path, width=400) as browser:
        for scheme, name in (("light", "default"), ("dark", "slate")):
            preference = {"name": "prefers-color-scheme", "value": scheme}
            browser.send("Emulation.setEmulatedMedia", features=[preference])
            browser.open(f"{site}docs/catalogue.html", loaded)
            assert browser.value("document.body.dataset.mdColorScheme") == name
            colour = browser.value("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", colour)[:3])) > 128) == (scheme == "light")
        for page in ("index.html", "BENCHMARKS.html", "docs/recipe-reference.html"):
            browser.open(site + page, loaded)
            assert browser.value("document.documentElement.scrollWidth") <= 400, page
        browser.resize(1280, 900)
        browser.value("document.querySelector('.md-search__input').focus()")
        browser.send("Input.insertText", text="expert parallel")
        browser.wait_for(f"{result}.length")
        assert "/docs/mixture-of-experts.html" in browser.value(f"{result}[0].href")
        assert browser.messages == []
        assert [url for url in browser.requests if not url.startswith((site, "data:"))] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("b.md", ""),
        ("b.md#c", "does not contain an anchor '#c'"),
        ("c.md", "link 'c.md', but the target is not found"),
        ("c", "unrecognized relative link"),
        ("/b.md", "absolute link"),
        ("https://b.md", 'not included in the "nav" configuration'),
    ],
)
def test_a_broken_link_or_a_forgotten_page_ends_the_build(
    link: str, message: str, tmp_path: Path
) -> None:
    nav = ["a.md"] if "nav" in message else ["a.md", "b.md"]
    settings = {"INHERIT": str(REPOSITORY / "mkdocs.yml"), "docs_dir": "pages", "nav": nav}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(settings | {"site_dir": "html"}))
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "a.md").write_text(f"# A\n\n[b]({link})\n")
    (tmp_path / "pages" / "b.md").write_text("# B\n")
    command = ["make", "site", f"ARGS=--config-file={tmp_path / 'mkdocs.yml'}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert bool(done.returncode) == bool(message) and message in done.stderr, done.stderr
