"""The section for BENCHMARKS.md, from the results of any number of invocations."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.parts import Part
from tests.gpu.runner import Outcome
from tests.gpu.setting import UNFINISHED

BEGIN, END = "<!-- make gpu: {} -->", "<!-- end of make gpu: {} -->"


def section(outcomes: Sequence[Outcome], *, missing: Sequence[Part], device: str) -> str:
    """Return the section as Markdown, between two markers.

    Args:
        outcomes: outcomes of all parts that have results
        missing: parts without results
        device: name of the GPU as its driver reports it
    """
    states = ", ".join(f"{each.part.name} {each.status}" for each in outcomes)
    minutes = sum(each.seconds for each in outcomes) / 60
    lines = [BEGIN.format(device), f"### {device}", "", "```", "make gpu", "```", ""]
    # Invocations may have run on different days and with different versions.
    abouts = list(dict.fromkeys((each.date, _about(each)) for each in outcomes))
    lines += [f"{date}: {about}." if about else f"{date}." for date, about in abouts]
    lines += ["", f"{states or 'No part has run'}; their durations sum to {minutes:.1f} minutes."]
    if missing:
        lines += ["", f"Not run: {', '.join(part.name for part in missing)}."]
    for outcome in outcomes:
        lines += ["", f"**{outcome.part.title}** ({outcome.status}, {outcome.seconds:.0f} s)", ""]
        lines += outcome.lines
        if outcome.status == UNFINISHED:
            lines.append("- **interrupted**: results so far")
        lines += [f"- skipped: {outcome.skipped}"] if outcome.skipped else []
        lines += [f"- **failed**: {_ends(failure)}" for failure in outcome.failures]
    lines += ["", END.format(device)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _ends(failure: str) -> str:
    """Return the first line of a failure, and the last one, which has the cause."""
    first, *others = failure.strip().splitlines()
    return f"{first} {others[-1].strip()}" if others else first


def _about(outcome: Outcome) -> str:
    return ", ".join(f"{name} {text}" for name, text in outcome.about if name != "device")


def insert(text: str, new: str, *, device: str) -> str:
    """Return a document with a device's section replaced, or added at the end."""
    begin, end = BEGIN.format(device), END.format(device) + "\n"
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        return before + new + rest.partition(end)[2]
    return text.rstrip("\n") + "\n\n" + new


def write(file: Path, new: str, *, device: str) -> None:
    """Insert a section into a file."""
    file.write_text(insert(file.read_text(encoding="utf-8"), new, device=device), encoding="utf-8")
