"""The museum of silent bugs: `prove.py` fails on each of them, and names module and axis."""

import gc
import shlex
import sys
import tomllib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutants.__main__ import Mutant
from threefold.commands import prove
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.prove import ranks as proof_ranks
from threefold.prove.layouts import ProofCase, settings_beyond

BUGS = Path(__file__).with_name("bugs.toml")
PAGE = REPOSITORY / "docs" / "silent-bugs.md"
SMALLEST = ("--ranks", "2", "--layers", "2", "--steps", "2")
QUICK = "bigcode-project/Megatron-LM#37"  # the others are exhaustive
MIN_BUGS = 30
run_cases_of_rank = proof_ranks._run_cases


@dataclass(frozen=True)
class SilentBug:
    """A bug of other training code, as a change of ours.

    Attributes:
        fault: the change
        reference: the public report
        arguments: of prove.py; their layouts show the bug
        module: beginning or end of the name of the module at fault
        axis: a setting of the smallest layout that fails
    """

    fault: Mutant
    reference: str
    arguments: tuple[str, ...]
    module: str
    axis: str


def read_bugs() -> list[SilentBug]:
    bugs = []
    for table in tomllib.loads(BUGS.read_text())["bug"]:
        arguments = [table.pop("recipe"), *SMALLEST, *shlex.split(table.pop("options"))]
        module, axis, reference = (table.pop(key) for key in ("module", "axis", "reference"))
        fault = Mutant(**table, test="")
        bugs.append(SilentBug(fault, reference, tuple(arguments), module, axis))
    return bugs


def functions_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of the functions and methods of a module, without those within functions."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & 1:  # CO_OPTIMIZED, which classes do not have
                yield constant
            else:
                yield from functions_of(constant)


def plant(fault: Mutant) -> None:
    """Give every function of the file at fault, in this process, the code of the faulty file."""
    path = REPOSITORY / fault.file
    old, new = (
        list(functions_of(compile(source, str(path), "exec")))
        for source in (path.read_text(), fault.applied(REPOSITORY))
    )
    codes = {
        (code.co_qualname, code.co_firstlineno): faulty
        for code, faulty in zip(old, new, strict=True)
    }
    gc.unfreeze()  # the fork server's imports, which `get_objects` would leave out
    for function in gc.get_objects():
        if isinstance(function, types.FunctionType):
            code = function.__code__
            if code.co_filename == str(path):
                key = code.co_qualname, code.co_firstlineno
                function.__code__ = codes.get(key, code)
    gc.freeze()  # again, or each collection would visit them


def run_with_bug(
    fault: Mutant, pipe: Connection, cases: Sequence[ProofCase], relay: Path | None
) -> None:
    """Run the cases of a rank with a fault."""
    import threefold.prove.training  # noqa: F401, whose functions the fault may change

    plant(fault)
    run_cases_of_rank(pipe, cases, relay)


def proof_of(
    bug: SilentBug, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[prove.Proof, bool]:
    """Run the proof of the smallest layout that a bug's arguments allow; return if it passes."""
    monkeypatch.setattr(sys, "argv", ["prove.py", *bug.arguments])
    options = prove.parse_command_line()
    recipe = load_recipe(REPOSITORY / options.recipe, options.set)
    small, cases = prove.plan(recipe, options, folder / "corpus")
    first = prove.reference(small, cases[0].precision)
    case = min(cases, key=lambda one: len(settings_beyond(one, first)))
    proof = prove.Proof(small, [case], ranks=options.ranks)
    monkeypatch.setattr(proof_ranks, "_run_cases", partial(run_with_bug, bug.fault))
    findings = list(proof.run())
    proof.find_cause(findings)
    assert not any(isinstance(finding.result, str) for finding in findings), findings
    return proof, all(finding.passes for finding in findings)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, marks=[] if bug.reference == QUICK else pytest.mark.exhaustive)
        for bug in read_bugs()
    ],
    ids=lambda bug: bug.reference,
)
def test_the_proof_fails_and_names_module_and_axis(
    bug: SilentBug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, passes = proof_of(bug, tmp_path, monkeypatch)
    print(f"{bug.reference}: {proof.cause}")
    assert not passes and proof.cause is not None
    module = proof.cause.module
    assert module.startswith(bug.module) or module.endswith(bug.module), proof.cause
    assert bug.axis in proof.cause.settings, proof.cause


def test_every_bug_is_another_program_and_on_the_page() -> None:
    bugs = read_bugs()
    assert len({bug.reference for bug in bugs}) == len(bugs) >= MIN_BUGS
    page = PAGE.read_text()
    for bug in bugs:
        assert bug.fault.text != bug.fault.replacement, bug
        compile(bug.fault.applied(REPOSITORY), bug.fault.file, "exec")
        owner, _, number = bug.reference.partition("#")
        assert (
            f"{owner}/issues/{number}" in page
            or f"{owner}/pull/{number}" in page
            or (not number and owner in page)
        ), bug.reference
        assert bug.fault.reason in page
