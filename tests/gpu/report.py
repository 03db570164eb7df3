"""The section for BENCHMARKS.md, with the command, versions, date and figures of all parts."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.gpu.runner import Outcome

BEGIN, END = "<!-- make gpu: {} -->", "<!-- end of make gpu: {} -->"


def section(
    outcomes: Sequence[Outcome], *, device: str, date: str, versions: Iterable[tuple[str, str]]
) -> str:
    """Return the section as Markdown, between two markers.

    Args:
        outcomes: outcomes of all requested parts
        device: name of the GPU as its driver reports it
        date: such as "2026-11-22"
        versions: (name, value) of everything that the figures depend on
    """
    about = ", ".join(f"{name} {text}" for name, text in versions)
    parts = ", ".join(f"{each.part.name} {each.status}" for each in outcomes)
    minutes = sum(each.seconds for each in outcomes) / 60
    lines = [
        BEGIN.format(device),
        f"### {device}",
        "",
        "```",
        "make gpu",
        "```",
        "",
        f"{date}; {about}; {minutes:.1f} minutes: {parts}.",
    ]
    for outcome in outcomes:
        lines += ["", f"**{outcome.part.title}** ({outcome.status}, {outcome.seconds:.0f} s)", ""]
        lines += outcome.lines
        lines += [f"- skipped: {outcome.skipped}"] if outcome.skipped else []
        lines += [f"- **failed**: {each.splitlines()[0]}" for each in outcome.failures]
    lines += ["", END.format(device)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


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
