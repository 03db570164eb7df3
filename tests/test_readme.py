"""The README is true: its tree, its commands, its numbers."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from models.cost import parameter_count
from recipes.training.recipe.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe

PUBLISHED = "recipes/planning/measured/published"
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
TREE = next(text for _, text in BLOCKS if text.startswith("recipes/"))
COMMANDS = [
    line.partition("  #")[0].strip()
    for kind, text in BLOCKS
    if not kind and text != TREE and not text.startswith("$")
    for line in text.replace("\\\n", "").splitlines()
]
PAGES = "".join(path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md")))
SHOWN = [  # a command and what it prints
    text
    for _, text in BLOCKS + re.findall(r"^```(\w*)\n(.*?)^```$", PAGES, re.DOTALL | re.MULTILINE)
    if text.startswith("$")
]


def tree_paths() -> list[str]:
    """The tree's entries as paths."""
    folders: list[tuple[int, str]] = []
    paths = []
    for line in TREE.splitlines():
        if line.startswith("Makefile"):
            paths += line.split()
            continue
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = "".join(folder for _, folder in folders) + name
        paths.append(path)
        if name.endswith("/"):
            folders.append((indent, name))
    return paths


def test_the_tree_is_what_is_there() -> None:
    paths = tree_paths()
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    listed = {path.removesuffix("/") for path in paths}
    for folder in ("recipes", "recipes/training", "models"):
        for file in (REPOSITORY / folder).glob("*.py"):
            name = str(file.relative_to(REPOSITORY))
            assert name in listed or file.name == "__init__.py", f"{name} is not in the tree"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    made = {"recipes/mine.toml"}  # by the cp before it
    for word in words:
        if word.startswith(("recipes/", "slurm/", "ds_configs/")) and word not in made:
            assert (REPOSITORY / word).exists(), word
    script = next((word for word in words if word.endswith(".py")), None)
    if script:
        usage = subprocess.run(
            [sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert usage.returncode == 0
        after = words[words.index(script) + 1 :]
        for option in (word for word in after if word.startswith("--")):
            assert option in usage.stdout, option


@pytest.mark.parametrize("text", SHOWN)
def test_a_shown_command_prints_what_is_shown(text: str) -> None:
    command, expected = text.removeprefix("$ ").split("\n", 1)
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.stdout + done.stderr == expected


def test_the_default_model_is_as_large_as_stated() -> None:
    count = parameter_count(load_recipe(DEFAULT_RECIPE).model)
    assert f"{count / 1e6:.1f} M parameter" in README


def test_every_deepspeed_config_is_explained() -> None:
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        assert f"`{path.name}`" in README


def test_the_proofs_are_counted_right() -> None:
    from tests.training.engine.test_layouts import CASES, QUICK
    from tests.training.recipe.test_schema import BAD

    assert f"in {len(CASES)} layouts" in README
    assert f"({sum(map(len, QUICK.values()))} of them here" in README
    assert len(BAD) > 50 and "More than 50 bad recipes" in README


def test_the_catalogue_is_the_planners() -> None:
    done = subprocess.run(
        [sys.executable, "recipes/plan.py", "--catalogue"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("\n") > 30 and done.stdout in README


def test_the_errors_of_published_tables_are_those_shown() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "recipes/plan.py",
            "--table",
            "recipes/planning/measured/published",
            "--json",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    shown = [
        line.split("|")[2:6] for line in README.splitlines() if re.match(r"\| \w.*A100 \|", line)
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
