"""Alerts in Weights & Biases: what happened to a run, and what launch.py decided.

Pure functions of the events of a run. An alert reaches users by mail or in Slack, if they have
enabled that in their settings of W&B.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.runtime.exits import HUNG

INFO, WARN, ERROR = "INFO", "WARN", "ERROR"  # levels of W&B
MAX_TITLE = 63  # characters, the limit of W&B
MAX_TEXT = 2000
MAX_ALERTS_AT_START = 20  # the newest ones
STARTS = ("start", "resume")
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        title: W&B sends alerts with the same title at most once a minute
        text: the details
        level: INFO, WARN or ERROR
    """

    title: str
    text: str
    level: str


def alert_of(event: Event) -> Alert | None:
    """Return the alert about an event; None for an event that needs no attention."""
    kind, reason = event.get("event"), str(event.get("reason", ""))
    step = event.get("step")
    if kind == "attempt":
        nodes, unused = _names(event.get("nodes")), _reasons(event.get("unused"))
        text = f"{reason}; after step {step}, on {nodes}; layout: {event.get('layout')}"
        text += f"; not used: {unused}" if unused else ""
        return _alert(f"attempt {event.get('number', '')} started", text, INFO)
    if kind == "attempt_end":
        blamed = _names(event.get("blamed"))
        return _alert(
            f"attempt {event.get('number', '')} ended",
            reason + (f"; blamed: {blamed}" if blamed else ""),
            WARN,
        )
    if kind == "gpu_error":
        left_out = "; the node is left out" if event.get("left_out") else ""
        return _alert(f"GPU error on {event.get('node')}", f"{event.get('error')}{left_out}", ERROR)
    if kind == "slow":
        nodes, ratio = _names(event.get("nodes")), event.get("ratio")
        return _alert("slow ranks", f"step {step}: ranks {event.get('ranks')} on {nodes} take "
                      f"{ratio} times as long as similar ranks", WARN)  # fmt: skip
    if kind == "rollback":
        text = f"step {step}: {reason}; continues after step {event.get('to')}"
        return _alert("rolled back", text, WARN)
    if kind == "skip" and "samples" in event:
        return _alert("step skipped", f"step {step}: {reason}", WARN)
    if kind == "skip":
        return _alert("damaged checkpoint", f"{event.get('checkpoint')}: {reason}", WARN)
    if kind == "stop":
        title = "out of memory" if event.get("out_of_memory") else "stopped"
        title = "no progress" if event.get("exit_code") == HUNG else title
        return _alert(title, reason, ERROR)
    return None


def alerts_at_start(events: Sequence[Event]) -> list[Alert]:
    """Return the alerts about what happened since the previous start and was not sent then.

    Rank 0 has sent alerts about what it recorded itself. Hangs and lacks of memory end the process
    before it can send anything, and launch.py does not send alerts at all.

    Args:
        events: all events up to the start of this process, oldest first
    """
    starts = [place for place, event in enumerate(events) if event.get("event") in STARTS]
    since = events[starts[-1] + 1 :] if starts else events
    failed = any(event.get("event") != "attempt" for event in since if _is_unsent(event))
    alerts = [alert_of(event) for event in since if _is_unsent(event)]
    # The first attempt of launch.py sends no alert.
    return [alert for alert in alerts if alert][-MAX_ALERTS_AT_START:] if failed or starts else []


def launch_facts(events: Iterable[Event], attempt: str) -> dict[str, Any]:
    """Return number, nodes, layout and reason of launch.py's attempt, for the run's page in W&B.

    Args:
        events: all events of the run
        attempt: the lease of the attempt; empty without launch.py
    """
    for event in events:
        if attempt and event.get("event") == "attempt" and event.get("attempt") == attempt:
            keys = {"number": "attempt", "nodes": "nodes", "layout": "layout", "reason": "reason"}
            return {name: event[key] for key, name in keys.items() if key in event}
    return {}


def _is_unsent(event: Event) -> bool:
    kind = event.get("event")
    if kind == "stop":
        return "wall_time" not in event  # the record of an orderly end has it
    if kind == "skip":
        return "checkpoint" in event
    return kind in ("attempt", "attempt_end", "gpu_error")


def _alert(title: str, text: str, level: str) -> Alert:
    return Alert(title[:MAX_TITLE], text[:MAX_TEXT], level)


def _names(value: Any) -> str:
    """Return a list of names for a message; empty if a user has edited it into something else."""
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _reasons(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{node} ({reason})" for node, reason in value.items())
