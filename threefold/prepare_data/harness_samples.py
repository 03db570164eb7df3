"""Tasks from the samples that lm-evaluation-harness writes with --log_samples."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.errors import UserError, counted, reason_of

ADVICE = "use a samples_*.jsonl file that lm_eval --log_samples wrote for a task of log-likelihoods"


def items_of_samples(file: Path, delimiter: str | None) -> list[dict[str, Any]]:
    """Return the items of a task from a file of samples.

    A sample with several continuations of one context is a multiple-choice item, and one with a
    single continuation is a cloze item. If the harness has applied several filters to a sample,
    the sample is used once. The harness prepends its target_delimiter to every choice, and divides
    log-likelihoods by the length of the choices without it.

    Args:
        file: the file
        delimiter: delimiter at the start of each continuation; None: a space if all continuations
            of the file begin with a space, otherwise nothing

    Raises:
        UserError: the file is missing or has no samples, or its task is of another kind.
    """
    samples: dict[Any, tuple[str, dict[str, Any]]] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({reason_of(error)}); {ADVICE}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            sample = json.loads(line)
            samples.setdefault(sample["doc_id"], (place, sample))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{place} is not a sample ({reason_of(error)}); {ADVICE}") from None
    pairs = {place: _pairs(sample, place) for place, sample in samples.values()}
    if not pairs:
        raise UserError(f"{file} has no samples; {ADVICE}")
    if delimiter is None:
        texts = [continuation for each in pairs.values() for _, continuation in each]
        delimiter = " " if all(text.startswith(" ") for text in texts) else ""
    return [_item(sample, place, pairs[place], delimiter) for place, sample in samples.values()]


def _pairs(sample: dict[str, Any], place: str) -> list[tuple[str, str]]:
    """Return the (context, continuation) of each request of a sample."""
    try:
        requests = sample["arguments"]
        found = list(requests.values()) if isinstance(requests, dict) else requests
        pairs = [tuple(each.values()) if isinstance(each, dict) else tuple(each) for each in found]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} has no requests ({reason_of(error)}); {ADVICE}") from None
    are_texts = all(len(each) == 2 and all(isinstance(t, str) for t in each) for each in pairs)
    if not pairs or not are_texts:
        raise UserError(f"{place} has requests that are not log-likelihoods; {ADVICE}")
    return [(context, continuation) for context, continuation in pairs]


def _item(
    sample: dict[str, Any], place: str, pairs: Sequence[tuple[str, str]], delimiter: str
) -> dict[str, Any]:
    contexts = {context for context, _ in pairs}
    if len(contexts) > 1:
        raise UserError(
            f"{place} compares {len(contexts)} contexts of one continuation, which is not "
            f"supported; use a task whose choices have the same context"
        )
    choices = [continuation.removeprefix(delimiter) for _, continuation in pairs]
    if any(not continuation.startswith(delimiter) for _, continuation in pairs):
        raise UserError(
            f"{place} has a continuation that does not begin with --delimiter {delimiter!r}; use "
            f"the target_delimiter of the task"
        )
    item = {"id": str(sample["doc_id"]), "prompt": contexts.pop(), "delimiter": delimiter}
    if len(choices) == 1:
        return item | {"answer": choices[0]}
    target = str(sample.get("target"))
    if not target.isdecimal() or int(target) >= len(choices):
        raise UserError(
            f"{place}: target = {sample.get('target')!r} is not the number of one of "
            f"{counted(len(choices), 'choice')}; {ADVICE}"
        )
    return item | {"choices": choices, "answer": int(target)}
