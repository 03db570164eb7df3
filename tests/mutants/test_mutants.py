"""The list of mutants, and the command that tries them, on a small repository."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest

from models.errors import UserError
from tests.conftest import users_files
from tests.mutants import __main__ as mutants
from tests.mutants.__main__ import (
    BROKEN,
    FAST,
    HUNG,
    LONG,
    NOTICED,
    SURVIVED,
    Mutant,
    Outcome,
    main,
    read_mutants,
    run,
    suffices,
)
from threefold.config.loading import REPOSITORY

MUTANTS = read_mutants()
MIN_MUTANTS_PER_PACKAGE = 3


def test_every_mutant_is_another_program() -> None:
    """A change of the code that removes the text of a mutant must change the mutant too."""
    for mutant in MUTANTS:
        broken = mutant.applied(REPOSITORY)
        assert mutant.text != mutant.replacement, mutant
        if mutant.file.endswith(".py"):
            compile(broken, mutant.file, "exec")


def test_every_mutant_names_a_test() -> None:
    for mutant in MUTANTS:
        file, separator, name = mutant.test.partition("::")
        name = name.partition("[")[0]
        assert separator and f"def {name}(" in (REPOSITORY / file).read_text(), mutant.test
        assert mutant.suite in (FAST, LONG), mutant


def test_every_package_has_mutants() -> None:
    folders = {
        str(file.parent.relative_to(REPOSITORY))
        for folder in ("models", "recipes", "threefold", "slurm")
        for file in (REPOSITORY / folder).rglob("*.py")
        if file.name != "__init__.py" and file not in users_files()
    }
    counts = Counter(mutant.package for mutant in MUTANTS)
    assert {name for name in folders if counts[name] < MIN_MUTANTS_PER_PACKAGE} == set()
    assert len(MUTANTS) == len(
        {(mutant.file, mutant.text, mutant.replacement) for mutant in MUTANTS}
    )


# The command

SOURCE = """
def double(number):
    return 2 * number
"""
TESTS = """
import subprocess
import time
from pathlib import Path

import pytest

from source import double


def test_two():
    assert double(2) == 4


def test_three():
    if double(3) != 6:
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path("PID_FILE").write_text(str(left.pid))
        time.sleep(600)


@pytest.fixture
def doubled():
    assert double(5) == 10
    return double(5)


def test_of_a_fixture(doubled):
    assert doubled == 10
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mutants, "PRELOADED", ())
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "source.py").write_text(SOURCE)
    (folder / "test_source.py").write_text(TESTS.replace("PID_FILE", str(tmp_path / "pid")))
    (folder / ".gitignore").write_text("/ignored\n")
    (folder / "ignored").write_text("of the user")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return folder


def mutant(replacement: str, test: str, text: str = "2 * number") -> Mutant:
    return Mutant("source.py", text, replacement, f"test_source.py::{test}", f"a {test}")


def contents(folder: Path) -> dict[Path, tuple[str, int]]:
    files = (file for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts)
    return {file: (file.read_text(), file.stat().st_mtime_ns) for file in files}


def test_mutants_are_noticed_survive_or_are_broken(
    repository: Path, capsys: pytest.CaptureFixture
) -> None:
    before = contents(repository)
    some = [
        mutant("3 * number", "test_two"),
        mutant("number * 2", "test_two"),  # of the same size, but not of the same bytecode
        mutant("3 * number", "test_of_a_fixture"),
        mutant("3 * nmuber", "test_two"),  # an undefined name
        mutant("2 *", "test_two"),
        mutant("", "test_two", text=SOURCE),  # nothing to import
    ]
    assert run(some, repository=repository, jobs=1) == 1
    printed = capsys.readouterr().out
    statuses = re.findall(rf"^({NOTICED}|{SURVIVED}|{HUNG}|{BROKEN}) ", printed, re.MULTILINE)
    assert statuses == [NOTICED, SURVIVED, NOTICED, BROKEN, BROKEN, BROKEN]
    assert re.search(r"^total +6 +2 +0 +4$", printed, re.MULTILINE)
    assert "'2 * number' -> 'number * 2'" in printed and "test_source.py::test_two" in printed
    assert contents(repository) == before


def test_a_hang_is_not_noticed_and_leaves_no_process(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(mutants, "SECONDS_PER_MUTANT", 5.0)
    assert run([mutant("3 * number", "test_three")], repository=repository, jobs=1) == 1
    assert capsys.readouterr().out.count(f"\n{HUNG} ") == 1
    pid = repository.with_name("pid")
    assert not psutil.pid_exists(int(pid.read_text()))


def test_tests_must_exist_and_pass_without_a_fault(
    repository: Path, capsys: pytest.CaptureFixture
) -> None:
    (repository / "source.py").write_text(SOURCE.replace("2 *", "1 + 2 *"))
    some = [mutant("3 * number", name) for name in ("test_two", "test_three", "test_missing")]
    assert run(some[:1], repository=repository, jobs=1) == 1
    printed = capsys.readouterr().out
    assert "fail without a fault:\ntest_source.py::test_two: " in printed and NOTICED not in printed
    assert run(some[2:], repository=repository, jobs=1) == 1
    assert "test_source.py::test_missing did not run" in capsys.readouterr().out


def test_a_text_must_occur_once(repository: Path) -> None:
    for text, count in (("number", 2), ("triple", 0)):
        with pytest.raises(UserError, match=f"{count} times instead of once"):
            run([mutant("3", "test_two", text)], repository=repository, jobs=1)


def outcomes(fast: int, long: int, survived: int = 0) -> list[Outcome]:
    quick, slow = (Mutant("a.py", "1", "2", "test", "a fault", suite) for suite in (FAST, LONG))
    return [
        *fast * [Outcome(quick, NOTICED, 0.0)],
        *long * [Outcome(slow, NOTICED, 0.0)],
        *survived * [Outcome(quick, SURVIVED, 0.0)],
    ]


@pytest.mark.parametrize(
    ("some", "enough"),
    [
        (outcomes(20, 0), True),
        (outcomes(19, 1), True),
        (outcomes(18, 2), False),
        (outcomes(99, 0, 1), False),
    ],
)
def test_nearly_all_must_be_noticed_by_make_test(some: list[Outcome], enough: bool) -> None:
    assert suffices(some) == enough


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "'0' is not in 1 .. 64; use 2"),
        (["--part", "3/2"], "'3/2' is not a part such as 1/10"),
        (["--part", "1"], "'1' is not a part such as 1/10"),
        (["--part", "5000/5000"], "--part 5000/5000: this part has no mutants"),
        (["--only", "recipes/nowhere"], "--only recipes/nowhere: no mutant changes a file there"),
    ],
)
def test_wrong_options_are_rejected(
    options: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    try:
        code = main(options)
    except SystemExit as exit:  # of argparse
        code = exit.code
    assert code == 2 and message in capsys.readouterr().err


def test_parts_are_disjoint_and_complete() -> None:
    parts = [mutants.chosen(MUTANTS, None, (number, 7)) for number in range(1, 8)]
    assert Counter(m for part in parts for m in part) == Counter(MUTANTS)
    (package,) = {m.package for m in mutants.chosen(MUTANTS, f"slurm{os.sep}", (1, 1))}
    assert package == "slurm"
