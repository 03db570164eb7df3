"""Run parts, each in a process that is ended when its time limit is reached."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.gpu.parts import Part
from tests.gpu.runs import cores, corpus, device_environment
from tests.gpu.setting import FAILED, SKIPPED, UNFINISHED, Setting, results_of
from threefold.config.loading import REPOSITORY
from threefold.runtime.ranks import killed_with_parent

MIN_PART_SECONDS = 40  # below it, a part would end before its first result
LOG_CHARACTERS = 2000  # of a part that has failed
CORES_PER_PART = 5  # of parts that run side by side, most of which start several runs


@dataclass
class Outcome:
    """A part's result.

    status: "passed", "failed", "skipped" or "unfinished"
    log: file with the output of its process; None: unknown
    date: such as "2026-11-22"
    about: (name, value) of everything that the figures depend on
    started: seconds since 1970
    """

    part: Part
    status: str
    seconds: float = 0.0
    log: Path | None = None
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    date: str = ""
    about: list[list[str]] = field(default_factory=list)
    started: float = 0.0

    @property
    def device(self) -> str:
        """Name of the GPU that ran the part."""
        return dict(map(tuple, self.about)).get("device", "unknown")


def outcomes_in(setting: Setting, parts: Sequence[Part]) -> list[Outcome]:
    """Return the outcomes of the parts that have results, of any number of invocations."""
    with results_of(setting.results) as entries:
        return [Outcome(part, **entries[part.name]) for part in parts if part.name in entries]


def run_parts(
    parts: Sequence[Part], setting: Setting, *, minutes: float, tell: Callable[[str], None]
) -> Iterator[Outcome]:
    """Run the parts in order; yield each outcome. A failure of one does not stop the others.

    Successive parts that measure no speed share the GPU, as many at a time as the cores allow.

    Args:
        parts: the parts, in order
        setting: the machine and the sizes
        minutes: time limit of all parts together; a part is skipped if too little time is left
        tell: function that prints a line
    """
    deadline = time.monotonic() + 60 * minutes

    def run(part: Part) -> Outcome:
        left = deadline - time.monotonic()
        if left < MIN_PART_SECONDS:
            reason = f"the {minutes:g} minutes for all parts are over; run it with --missing"
            return Outcome(part, SKIPPED, skipped=reason)
        tell(f"{part.name}: {part.title}")
        outcome = run_part(part, setting, seconds=min(part.seconds, left))
        tell(describe(outcome))
        return outcome

    corpus(setting)  # here, because parallel parts would race to write it
    at_a_time = max(1, cores() // CORES_PER_PART)
    for together, group in groupby(parts, key=lambda part: part.side_by_side):
        if together and at_a_time > 1:
            with ThreadPoolExecutor(at_a_time) as pool:
                yield from pool.map(run, list(group))
        else:
            yield from map(run, group)


def run_part(part: Part, setting: Setting, *, seconds: float) -> Outcome:
    """Run a part in a process of its own; end the process and its runs when the time is over.

    The outcome contains the results until then. Results of an earlier invocation are kept until the
    part has its first result.
    """
    setting = replace(setting, part=part.name, started=time.time())
    log = setting.output / f"{part.name}.log"
    shutil.rmtree(setting.runs, ignore_errors=True)  # otherwise old runs would be resumed
    settings = json.dumps(setting.as_json())
    with log.open("wb") as output:
        process = subprocess.Popen(
            killed_with_parent(
                [sys.executable, "-m", "tests.gpu.part", part.function, part.argument, settings]
            ),
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
    with results_of(setting.results) as entries:
        before = entries.get(part.name)
        is_own = before is not None and before["started"] == setting.started
        entry: dict[str, Any] = before if is_own else {"lines": [], "failures": [], "skipped": ""}
        entry |= {
            "started": setting.started,
            "seconds": time.time() - setting.started,
            "about": setting.about,
            "date": time.strftime("%Y-%m-%d"),
        }
        if not is_own or entry["status"] == UNFINISHED:
            has_less_time = seconds < part.seconds  # the command's own time is over
            entry["status"] = UNFINISHED if code is None and has_less_time else FAILED
            entry["failures"].append(
                f"killed after {seconds:.0f} seconds, its time limit"
                if code is None
                else f"its process ended with {code}"
            )
        if is_own or before is None:
            entries[part.name] = entry
    return Outcome(part, log=log, **entry)


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
    if outcome.failures and outcome.log is not None:
        text = outcome.log.read_text(errors="replace")[-LOG_CHARACTERS:].rstrip()
        lines.append(f"the end of {outcome.log}:\n{text}")
    return "\n".join(
        [*lines, f"{outcome.part.name} {outcome.status} in {outcome.seconds:.0f} s", ""]
    )
