"""The messages and the event of a preflight."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from threefold.pretrain.preflight.measures import MATMUL, MEMORY, unit
from threefold.pretrain.preflight.verdict import Finding, RankLayout, Severity, Summary, Verdict

MAX_IN_MESSAGE = 8


def healthy_line(verdict: Verdict, hosts: Sequence[str], seconds: float) -> str:
    """Return a line with the median of each measure, and the slowest device."""
    parts = []
    for measure, summary in verdict.summaries.items():
        part = f"{measure} {number(summary.median)} {unit(measure)}"
        details = []
        if measure == MATMUL and len(hosts) > 1:
            rank = summary.rank
            details.append(f"slowest {number(summary.lowest)} on rank {rank} ({hosts[rank]})")
        if summary.planned:
            details.append(f"planned {number(summary.planned)}")
        parts.append(part + (f" ({', '.join(details)})" if details else ""))
    return f"preflight: {'; '.join(parts)}; in {seconds:.1f} s"


def warnings(verdict: Verdict, hosts: Sequence[str]) -> list[str]:
    """Return a sentence for each finding and each mismatch with the planner.

    At most MAX_IN_MESSAGE findings are in the list.

    Args:
        verdict: the judgement
        hosts: name of the host of each rank
    """
    found = [f"preflight: {sentence(finding, hosts)}" for finding in verdict.findings]
    more = len(found) - MAX_IN_MESSAGE
    if more > 0:
        found[MAX_IN_MESSAGE:] = [f"preflight: {more} more findings of this kind"]
    return found + [
        f"preflight: {mismatch(measure, verdict.summaries.get(measure))}"
        for measure in verdict.mismatches
    ]


def sentence(finding: Finding, hosts: Sequence[str]) -> str:
    """Return a finding as a sentence."""
    ranks, measure = finding.ranks, finding.measure
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    numbers = shortened(map(str, ranks))
    who = f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers} ({shortened(names)})"
    if finding.severity == Severity.BROKEN:
        return f"{who}: {finding.problem}"
    assert finding.value is not None and finding.median_of_others is not None
    of = unit(measure)
    planned = f", planned {number(finding.planned)} {of}" if finding.planned else ""
    if measure == MEMORY:
        return (
            f"{who}: {number(finding.value)} {of} of memory are free, the median of the others is "
            f"{number(finding.median_of_others)} {of}{planned}; another process may use the device"
        )
    shared = "; the nodes cannot be told apart" if finding.severity == Severity.SHARED else ""
    return (
        f"{who}: {measure} {number(finding.value)} {of}, the median of the others is "
        f"{number(finding.median_of_others)} {of}{planned}{shared}"
    )


def shortened(names: Iterable[str]) -> str:
    """Return names for a message, at most MAX_IN_MESSAGE of them."""
    known = list(names)
    return ", ".join(known[:MAX_IN_MESSAGE]) + (", ..." if len(known) > MAX_IN_MESSAGE else "")


def mismatch(measure: str, summary: Summary | None) -> str:
    """Return a mismatch with the planner as a sentence."""
    if summary is None:
        return (
            "the planner predicts that the run needs more memory than is free on most devices; "
            "plan.py shows layouts that need less"
        )
    of = unit(measure)
    return (
        f"{measure} reaches {number(summary.median)} {of} on all ranks, and the planner expects "
        f"{number(summary.planned or 0.0)} {of}, so its predictions are too optimistic here; check "
        f"clocks and network settings, or measure the cluster with sweep.py --links"
    )


def event(
    verdict: Verdict, layout: RankLayout, hosts: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Return the facts of the event `preflight`, at most MAX_IN_MESSAGE findings of them.

    Args:
        verdict: the judgement
        layout: the ranks of the run
        hosts: name of the host of each rank
        seconds: duration of the preflight
    """
    facts: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "measures": {name: _summary(each, hosts) for name, each in verdict.summaries.items()},
    }
    if verdict.findings:
        facts["findings"] = [sentence(each, hosts) for each in verdict.findings[:MAX_IN_MESSAGE]]
    if verdict.mismatches:
        facts["below_plan"] = list(verdict.mismatches)
    if verdict.left_out:
        facts["left_out"] = [
            {
                "rank": node * layout.per_node,
                "reason": sentence(each, hosts),
                "broken": each.severity == Severity.BROKEN,
            }
            for node, each in verdict.left_out.items()
        ]
    return facts


def _summary(summary: Summary, hosts: Sequence[str]) -> Mapping[str, Any]:
    facts = {
        "median": rounded(summary.median),
        "lowest": rounded(summary.lowest),
        "rank": summary.rank,
        "host": hosts[summary.rank],
    }
    return facts | ({"planned": rounded(summary.planned)} if summary.planned else {})


def rounded(value: float) -> float:
    """Round to three significant digits, because more are not reproducible."""
    return float(f"{value:.3g}")


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{rounded(value):,g}"
