"""A short run of the fuzzers, and faults that they must find."""

import random
from pathlib import Path

import pytest

from models.errors import UserError
from tests.fuzzing import __main__ as fuzzing
from tests.fuzzing.__main__ import Kind, attempt, fuzz, kinds, limits
from threefold.config import loading

INPUTS = {"events": 30, "metrics": 30, "lock": 30}  # the other kinds are faster
NAMES = (
    *("recipe", "set", "deepspeed", "manifest", "corpus", "pieces"),
    *("index", "events", "metrics", "lock", "hosts"),
)


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds(tmp_path_factory.mktemp("fuzzing"))}


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_accepted_or_rejected_with_a_message(
    name: str, by_name: dict[str, Kind]
) -> None:
    kind = by_name[name]
    with limits():
        assert attempt(kind, kind.seeds[0]) is None
        result = fuzz(kind, 0, iter(range(INPUTS.get(name, 120))), shorten=1.0)
    shown = {site: (f.number, f.content[:300], f.error) for site, f in result.failures.items()}
    assert shown == {}
    assert result.accepted + result.rejected >= 30
    assert result.rejected or name in INPUTS, "no mutation was noticed"


def test_all_kinds_are_tested(by_name: dict[str, Kind]) -> None:
    assert set(by_name) == set(NAMES)


def test_a_fault_is_found_and_its_input_is_shortened(
    by_name: dict[str, Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the message about an unknown phase, the options of a missing phase fail."""

    def fault(phases: object, override: str) -> dict[str, object]:
        return {phase["name"]: phase for phase in phases}  # type: ignore[attr-defined]

    monkeypatch.setattr(loading, "_phases_by_name", fault)
    kind = by_name["set"]
    with limits():
        result = fuzz(kind, 0, iter(range(400)), shorten=2.0)
    assert result.failures
    number = min(failure.number for failure in result.failures.values())
    shortest = min((failure.content for failure in result.failures.values()), key=len)
    assert len(shortest) < len(kind.input(0, number))


def test_hangs_and_memory_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(content: bytes) -> None:
        if content.startswith(b"h"):
            while True:
                pass
        if content.startswith(b"m"):
            bytearray(2**40)
        raise UserError("rejected")

    monkeypatch.setattr(fuzzing, "CPU_SECONDS_PER_INPUT", 0.1)
    kind = Kind("x", [b"h"], use)
    with limits():
        assert isinstance(attempt(kind, b"h"), fuzzing.Hang)
        assert isinstance(attempt(kind, b"m"), MemoryError)
        assert isinstance(attempt(kind, b"x"), UserError)


def test_an_input_depends_only_on_the_seed_and_its_number(by_name: dict[str, Kind]) -> None:
    kind = by_name["recipe"]
    numbers = list(range(20))
    first = {number: kind.input(7, number) for number in numbers}
    random.Random(0).shuffle(numbers)
    assert {number: kind.input(7, number) for number in numbers} == first
    assert kind.input(8, 0) != first[0]


def test_the_command_prints_the_seed_and_repeats_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(content: bytes) -> None:
        if b"fault" in content:
            raise KeyError("fault")

    monkeypatch.setattr(fuzzing, "kinds", lambda folder: [Kind("x", [b"some fault here"], use)])
    arguments = ["fuzzing", "--seconds", "0.2", "--seed", "5"]
    monkeypatch.setattr("sys.argv", arguments)
    assert fuzzing.main() == 1
    shown = capsys.readouterr().out
    assert shown.startswith("seed 5\n") and "KeyError" in shown and "b'fault'" in shown
    command = next(line for line in shown.splitlines() if "python -m tests.fuzzing" in line)
    monkeypatch.setattr("sys.argv", ["fuzzing", *command.split()[3:]])
    assert fuzzing.main() == 1
    monkeypatch.setattr("sys.argv", ["fuzzing", "--only", "y"])
    with pytest.raises(SystemExit, match="--only y is not a kind of input; use x"):
        fuzzing.main()
