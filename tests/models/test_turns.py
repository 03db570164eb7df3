"""Two functions take turns in a fixed order, and errors of one end the other."""

import gc
import threading

import pytest

from models.experts.overlap import StoppedError, Turns, running_helper


def stepping(turns: Turns, name: str, steps: int, events: list[str]) -> None:
    for number in range(steps):
        events.append(f"{name}{number}")
        turns.switch()


@pytest.mark.parametrize(
    ("helper", "main", "expected"),
    [
        (2, 2, ["b0", "a0", "b1", "a1"]),
        (3, 1, ["b0", "a0", "a1", "a2"]),
        (1, 3, ["b0", "a0", "b1", "b2"]),
        (2, 0, ["a0", "a1"]),
        (0, 2, ["b0", "b1"]),
    ],
)
def test_functions_take_turns_until_both_have_ended(
    helper: int, main: int, expected: list[str]
) -> None:
    turns, events = Turns(), list[str]()
    for _ in range(2):
        events.clear()
        turns.take(
            lambda: stepping(turns, "a", helper, events),
            lambda: stepping(turns, "b", main, events),
        )
        assert events == expected


def test_nothing_switches_outside_of_turns() -> None:
    Turns().switch()


def test_a_switch_in_a_third_thread_belongs_to_the_main_function() -> None:
    """Autograd calls the functions of a backward pass on a GPU from a thread of its own."""
    turns, events = Turns(), list[str]()

    def main() -> None:
        thread = threading.Thread(target=stepping, args=(turns, "b", 2, events))
        thread.start()
        thread.join()

    turns.take(lambda: stepping(turns, "a", 2, events), main)
    assert events == ["b0", "a0", "b1", "a1"]


@pytest.mark.parametrize("fails", ["helper", "main"])
def test_an_error_of_one_function_ends_the_other(fails: str) -> None:
    turns, seen = Turns(), list[type[BaseException]]()

    def failing() -> None:
        turns.switch()
        raise ValueError("too bad")

    def other() -> None:
        try:
            stepping(turns, "", 5, [])
        except BaseException as problem:
            seen.append(type(problem))
            raise

    functions = (failing, other) if fails == "helper" else (other, failing)
    with pytest.raises(ValueError, match="too bad"):
        turns.take(*functions)
    assert seen == [StoppedError] and turns.is_helper is None
    turns.take(lambda: None, lambda: None)  # they can be used again


def test_the_first_error_is_the_one_that_is_raised() -> None:
    turns = Turns()

    def helper() -> None:
        raise KeyError("first")

    def main() -> None:
        try:
            turns.switch()
        except StoppedError as stopped:
            raise ValueError("second") from stopped

    with pytest.raises(KeyError, match="first"):
        turns.take(helper, main)


def test_the_thread_stays_and_ends_with_its_turns() -> None:
    turns, seen = Turns(), list[threading.Thread]()
    for _ in range(2):
        turns.take(lambda: seen.append(threading.current_thread()), lambda: None)
    assert seen[0] is seen[1] is not threading.current_thread()
    del turns
    gc.collect()
    seen[0].join(timeout=10)
    assert not seen[0].is_alive()


def test_a_report_of_a_hang_finds_the_helper_only_while_it_runs() -> None:
    turns, found = Turns(), list[str | None]()

    def look() -> None:
        frame = running_helper()
        found.append(frame and frame.f_code.co_name)

    def helper() -> None:
        look()
        turns.switch()

    def main() -> None:
        look()
        turns.switch()
        look()

    turns.take(helper, main)
    look()
    assert found == [None, "running_helper", None, None]
