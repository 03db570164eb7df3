"""Run parts one after the other, each in a process that is ended when its time limit is reached."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.training.recipe.loading import REPOSITORY
from tests.gpu.parts import Part
from tests.gpu.runs import device_environment
from tests.gpu.setting import FAILED, SKIPPED, Setting

LEAST_SECONDS = 15  # in which a part can do something
LOG_CHARACTERS = 2000  # of a part that has failed


@dataclass
class Outcome:
    """A part's result.

    status: "passed", "failed" or "skipped"
    log: file with the output of its process
    """

    part: Part
    status: str
    seconds: float
    log: Path
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""


def run_parts(
    parts: Sequence[Part], setting: Setting, *, minutes: float, tell: Callable[[str], None]
) -> list[Outcome]:
    """Run the parts in order; a failure of one part does not stop the others.

    A part may also use the time that parts before it have left.

    Args:
        parts: the parts, in order
        setting: the machine and the sizes
        minutes: time limit of all parts together; a part is skipped if too little time is left
        tell: function that prints a line
    """
    deadline = time.monotonic() + 60 * minutes
    outcomes, spare = [], 0.0
    for number, part in enumerate(parts, start=1):
        left = deadline - time.monotonic()
        tell(f"[{number}/{len(parts)}] {part.name}: {part.title}")
        if left < LEAST_SECONDS:
            reason = f"the {minutes:g} minutes for all parts are over; use a larger --minutes"
            outcome = Outcome(part, SKIPPED, 0.0, Path(), skipped=reason)
        else:
            outcome = run_part(part, setting, seconds=min(part.seconds + spare, left))
            if outcome.status != SKIPPED:  # a skipped part leaves no time to the others
                spare = max(0.0, part.seconds + spare - outcome.seconds)
        outcomes.append(outcome)
        tell(describe(outcome))
    return outcomes


def run_part(part: Part, setting: Setting, *, seconds: float) -> Outcome:
    """Run a part in a process of its own; end the process and its runs when the time is over.

    The outcome contains the results until then.
    """
    log = setting.output / f"{part.name}.log"
    file = setting.output / f"{part.name}.json"
    file.unlink(missing_ok=True)
    settings = json.dumps(replace(setting, result_file=file).as_json())
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.part", part.function, settings],
            cwd=REPOSITORY,
            env=device_environment(setting.device, small=setting.small),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its runs are in its process group
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    taken = time.monotonic() - started
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    outcome = Outcome(part, found.pop("status", FAILED), taken, log, **found)
    if code is None:
        outcome.failures.append(f"ended after {seconds:.0f} seconds, which is its time")
    elif code or not found:
        outcome.failures.append(f"its process ended with {code}")
    if outcome.failures:
        outcome.status = FAILED
    return outcome


def end_group(process: subprocess.Popen) -> None:
    """Kill a part's process and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe(outcome: Outcome) -> str:
    """Return the lines that describe a part's outcome on the terminal."""
    lines = [*outcome.lines]
    if outcome.skipped:
        lines.append(f"skipped: {outcome.skipped}")
    for failure in outcome.failures:
        lines.append(f"FAILED: {failure}")
    if outcome.failures:
        text = outcome.log.read_text(errors="replace")[-LOG_CHARACTERS:].rstrip()
        lines.append(f"the end of {outcome.log}:\n{text}")
    return "\n".join([*lines, f"{outcome.status} in {outcome.seconds:.0f} s", ""])
