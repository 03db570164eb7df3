"""The files around the code: licence, contributing, continuous integration and containers."""

import ast
import itertools
import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.parallel import DURATIONS
from threefold.config.loading import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONTRIBUTING = (REPOSITORY / "CONTRIBUTING.md").read_text()
WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
CONTAINER = REPOSITORY / "slurm" / "container"
DOCKERFILE, DEFINITION = (
    (CONTAINER / name).read_text() for name in ("Dockerfile", "threefold.def")
)
MODULES_OF_OTHERS = {
    "distributed_c10d.py", "flash_attn_interface.py",
    "lm_eval/api/model.py", "lm_eval/api/task.py", "megatron/core/pipeline_parallel/schedules.py",
    "pretrain_gpt.py", "pretrain_llama.py", "runtime/pipe/module.py", "runtime/pipe/schedule.py",
    "torch/_meta_registrations.py", "training/checkpointing.py",
}  # fmt: skip
CREATED_BY_THE_READER = {"recipes/llama/34b.toml", "recipes/FAMILY/SIZE.toml"}


def pins(file: Path) -> dict[str, str]:
    """Return the pinned version of each package of a requirements file."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]  # fails for a line that is not an exact pin
    return {name.lower().replace("_", "-"): version for name, version in pairs}


REQUIREMENTS = pins(REPOSITORY / "requirements.txt")


def make_targets() -> set[str]:
    phony = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    return set(phony[1].split())


@pytest.mark.parametrize(
    ("runner", "code", "output"),
    [
        ("interrupt(); main = print", -signal.SIGINT, ""),  # while it imports torch
        ("def main(): interrupt(); print('ranks have saved'); exit(5)", 5, "ranks have saved\n"),
    ],
)
def test_an_interrupt_of_make_pretrain_prints_no_traceback(
    runner: str, code: int, output: str, tmp_path: Path
) -> None:
    """A module takes the place of DeepSpeed's runner, and interrupts itself."""
    launcher = tmp_path / "deepspeed" / "launcher"
    launcher.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    interrupt = "import signal\ninterrupt = lambda: signal.raise_signal(signal.SIGINT)\n"
    (launcher / "runner.py").write_text(interrupt + runner)
    makefile = (REPOSITORY / "Makefile").read_text().replace("\\\n", "")
    definition = re.search(r"^DEEPSPEED := \S+/python -c '(.*)'$", makefile, re.MULTILINE)
    assert definition and "$(DEEPSPEED) --quiet" in makefile
    done = subprocess.run(
        [sys.executable, "-c", definition[1]], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


def test_the_licence_and_the_version_are_declared_once() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (REPOSITORY / "LICENSE").read_text()
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (citation["license"], citation["version"]) == ("Apache-2.0", PROJECT["version"])
    assert f": {PROJECT['version']}\n" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_make_lists_every_command() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory"], cwd=REPOSITORY, capture_output=True, text=True
    )
    listed = dict(re.findall(r"^make (\w+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(listed) == make_targets() and done.stderr == ""


@pytest.mark.parametrize("text", re.findall(r"`([^`\n]+)`", CONTRIBUTING))
def test_contributing_names_files_and_commands_that_exist(text: str) -> None:
    for word in text.split():
        if "/" in word and word not in CREATED_BY_THE_READER and not word.startswith("-"):
            assert (REPOSITORY / word).exists(), word
    if text.startswith("make "):
        assert text.split()[1] in make_targets()


def test_ci_runs_every_part() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    (chains,) = re.findall(r"^chains=\((.*)\)", script, re.MULTILINE)
    parts = re.sub('["+]', " ", chains).split()
    assert WORKFLOW["jobs"]["ci"]["strategy"]["matrix"]["part"] == parts
    assert set(parts) <= make_targets()
    assert set(re.findall(r"^    (\w+)\)", script, re.MULTILINE)) == set(parts)
    assert any(".ci/run" in step.get("run", "") for step in WORKFLOW["jobs"]["ci"]["steps"])


def test_ci_rejects_an_unknown_part() -> None:
    done = subprocess.run([REPOSITORY / ".ci/run", "tests"], capture_output=True, text=True)
    assert done.returncode == 2 and "unknown part tests" in done.stderr


def test_hooks_call_pinned_programs() -> None:
    hooks = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    (local,) = hooks["repos"]
    assert local["repo"] == "local"
    for hook in local["hooks"]:
        program = hook["entry"].split()[0]
        assert program.removeprefix(".venv/bin/") in REQUIREMENTS and hook["language"] == "system"


def test_containers_install_the_pinned_packages() -> None:
    cuda = pins(CONTAINER / "requirements-cuda.txt")
    assert set(cuda).isdisjoint(REQUIREMENTS)
    image = re.search(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE)[1]
    assert re.search(r"^From: (\S+)$", DEFINITION, re.MULTILINE)[1] == image
    release = re.match(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu24\.04$", image)[1]
    assert cuda["cuda-toolkit"].startswith(f"{release}.")
    assert f"torch=={REQUIREMENTS['torch']}" in DOCKERFILE
    for recipe in (DOCKERFILE, DEFINITION):
        assert f'torch.version.cuda == "{release}"' in recipe
        for name in ("requirements.txt", "slurm/container/requirements-cuda.txt"):
            assert f"--requirement /opt/threefold/{Path(name).name}" in recipe
            assert re.search(rf"^\s*(COPY )?.*\b{name}", recipe, re.MULTILINE)
            assert (REPOSITORY / name).exists()


def test_the_site_adds_packages_to_the_pinned_ones() -> None:
    site = pins(REPOSITORY / "requirements-docs.txt")
    assert "mkdocs-material" in site and set(site).isdisjoint(REQUIREMENTS)


def test_both_containers_run_the_same_commands() -> None:
    """The Dockerfile joins commands with &&, the definition has one per line."""

    def commands(text: str) -> set[str]:
        joined = re.sub(r"\s*\\\n\s*", " ", text)
        words = re.findall(r"(?:DS_BUILD_OPS=0 |python3 -m venv |apt-get |DEBIAN_).*", joined)
        return {word.strip() for line in words for word in line.split("&&")}

    ran = commands(DEFINITION.partition("%post")[2].partition("%environment")[0])
    assert len(ran) >= 4 and ran <= commands(DOCKERFILE)


def test_the_definition_is_valid_shell() -> None:
    script = DEFINITION.partition("%post")[2].partition("%environment")[0]
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_files_with_a_recorded_time_exist() -> None:
    recorded = json.loads(DURATIONS.read_text())
    assert recorded[""]
    assert [file for times in recorded.values() for file in times if not Path(file).exists()] == []


def test_modules_that_the_code_names_exist() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    parts = [file.split("/") for file in tracked]
    known = {"/".join(names[first:]) for names in parts for first in range(len(names))}
    for file in tracked:
        if file.startswith(("models/", "threefold/", "recipes/")):
            named = re.findall(r"(?<![\w./{-])[\w/]+\.py\b", (REPOSITORY / file).read_text())
            missing = set(named) - known - MODULES_OF_OTHERS
            assert not missing, f"{file} names {', '.join(sorted(missing))}"


def test_scripts_import_from_the_repository() -> None:
    """Each script removes its own folder from sys.path before it imports a package.

    Otherwise transformers, for example, would import benchmarks/kernels.py as a package `kernels`.
    """
    scripts = set()
    for file in [*REPOSITORY.glob("benchmarks/*.py"), *REPOSITORY.glob("recipes/*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        statements = [ast.unparse(node) for node in tree.body]
        if "__name__ == '__main__'" not in statements[-1]:
            continue
        scripts.add(file.name)
        before = itertools.takewhile(lambda text: "sys.path[0] = " not in text, statements)
        imports = (re.match(r"(?:from|import) (\w+)", text) for text in before)
        assert {match[1] for match in imports if match} <= sys.stdlib_module_names, file
    assert {"published_results.py", "pretrain.py", "reduction_error.py"} <= scripts
