"""The judgement of a preflight: which devices and links are broken or slow, and what follows.

Pure functions, so that every combination can be tested. A rank is compared with the median of the
other ranks, not with the planner's numbers: if all ranks are equally slow, then the planner is
wrong for this cluster, and no node is to blame.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from threefold.pretrain.preflight.measures import (
    MATMUL,
    MAX_BLAMED_NODES,
    MEMORY,
    DeviceReport,
    LinkReport,
)
from threefold.pretrain.preflight.planned import Planned
from threefold.pretrain.preflight.verdict import Finding, RankLayout, Severity, Summary, Verdict

MEMORY_MARGIN_GIB = 2.0  # of free memory, by which healthy devices may differ


def judge(
    devices: Sequence[DeviceReport],
    *,
    links: Sequence[LinkReport],
    layout: RankLayout,
    planned: Planned,
    ratio: float,
    spares: int = 0,
) -> Verdict:
    """Return the judgement.

    Args:
        devices: the device of each rank
        links: the links of each rank; empty if they were not measured
        layout: the ranks of the run
        planned: the planner's numbers
        ratio: a rank is slow if its value times `ratio` is below the median of the others
        spares: number of spare nodes
    """
    measured = _measured(devices, links, layout)
    findings = _findings(measured, devices, layout, planned, ratio)
    summaries = {
        measure: _summary(values, planned.rates.get(measure))
        for measure, values in measured.items()
        if values
    }
    nodes = -(-len(devices) // layout.per_node)
    left_out = _left_out(findings, layout, nodes=nodes, spares=spares)
    broken = any(finding.severity == Severity.BROKEN for finding in findings)
    return Verdict(
        findings,
        summaries,
        _mismatches(summaries, devices, planned, ratio),
        left_out,
        stops=broken or bool(left_out),
    )


# The ranks that share a value, in the order of ranks; True if a low value blames their node.
Values = dict[tuple[int, ...], tuple[float, bool]]


def _measured(
    devices: Sequence[DeviceReport], links: Sequence[LinkReport], layout: RankLayout
) -> dict[str, Values]:
    """Return the values of each measure, the devices first."""
    found: dict[str, Values] = {MATMUL: {}}
    for rank, device in enumerate(devices):
        if device.tflops is not None and not device.problem:
            found[MATMUL][(rank,)] = (device.tflops, True)
    for rank, report in enumerate(links):
        for measure, rates in report.transfers.items():
            # A rank's fastest partner counts, because slower partners may themselves be at fault.
            # If a rank has only one partner, on another node, it is unclear which of the two nodes
            # is slow.
            ranks = tuple(sorted((rank, *rates))) if len(rates) == 1 else (rank,)
            within = layout.node(ranks[0]) == layout.node(ranks[-1])
            if rates:
                found.setdefault(measure, {})[ranks] = (max(rates.values()), within)
    for axis, groups in layout.groups.items():
        for members in groups if links else ():
            within = layout.node(members[0]) == layout.node(members[-1])
            rate = min(links[rank].groups[axis] for rank in members)
            found.setdefault(axis, {})[tuple(members)] = (rate, within)
    return found


def _findings(
    measured: Mapping[str, Values],
    devices: Sequence[DeviceReport],
    layout: RankLayout,
    planned: Planned,
    ratio: float,
) -> list[Finding]:
    """Return what is broken or slow, the worst first.

    measured: measure -> its values
    """
    findings = [
        Finding(Severity.BROKEN, MATMUL, (rank,), problem=device.problem)
        for rank, device in enumerate(devices)
        if device.problem
    ]
    blamed = {layout.node(finding.ranks[0]) for finding in findings}
    for measure, values in measured.items():
        expected = planned.rates.get(measure)
        found = [
            finding
            for comparable in _comparable(measure, values, devices)
            for finding in _slow(measure, comparable, expected, ratio)
        ]
        own = [each for each in found if each.severity == Severity.SLOW]
        blamed |= {layout.node(each.ranks[0]) for each in own}
        # A slow node explains the slow links and groups that it shares with other nodes.
        findings += own + [
            each
            for each in found
            if each.severity == Severity.SHARED
            and blamed.isdisjoint(layout.node(rank) for rank in each.ranks)
        ]
    findings += _short_of_memory(devices, layout, planned)
    return sorted(findings, key=lambda each: (-each.severity, -each.ratio, each.ranks))


def _comparable(measure: str, values: Values, devices: Sequence[DeviceReport]) -> Iterator[Values]:
    """Yield the values that should be equal: matmul rates only of devices with the same name."""
    if measure != MATMUL:
        yield values
        return
    for name in {device.device for device in devices}:
        yield {ranks: each for ranks, each in values.items() if devices[ranks[0]].device == name}


def _slow(measure: str, values: Values, planned: float | None, ratio: float) -> list[Finding]:
    """Return the findings of a measure: values below the median of the others / `ratio`."""
    ordered = sorted(value for value, _ in values.values())
    found = []
    for ranks, (value, blames) in values.items():
        others = median_of_others(ordered, value)
        if others is not None and value * ratio < others:
            severity = Severity.SLOW if blames else Severity.SHARED
            found.append(Finding(severity, measure, ranks, value, others, planned))
    return found


def median_of_others(ordered: Sequence[float], value: float) -> float | None:
    """Remove one value and return the median of the others; None if there are no others."""
    count = len(ordered) - 1
    if count < 1:
        return None
    own = bisect_left(ordered, value)

    def other(index: int) -> float:
        return ordered[index if index < own else index + 1]

    return (other((count - 1) // 2) + other(count // 2)) / 2


def _short_of_memory(
    devices: Sequence[DeviceReport], layout: RankLayout, planned: Planned
) -> Iterable[Finding]:
    """Yield the devices with less free memory than the others, which another process may use."""
    free: dict[str, list[float]] = {}
    for device in devices:
        if device.free_gib is not None:
            free.setdefault(device.device, []).append(device.free_gib)
    ordered = {name: sorted(values) for name, values in free.items()}
    for rank, device in enumerate(devices):
        if device.free_gib is None or device.problem:
            continue
        others = median_of_others(ordered[device.device], device.free_gib)
        if others is not None and device.free_gib < others - MEMORY_MARGIN_GIB:
            planned_gib = predicted_memory_gib(rank, len(devices), planned, layout)
            yield Finding(Severity.SLOW, MEMORY, (rank,), device.free_gib, others, planned_gib)


def predicted_memory_gib(
    rank: int, ranks: int, planned: Planned, layout: RankLayout
) -> float | None:
    """Return the memory that the planner predicts for a rank, in GiB."""
    if not planned.memory_gib:
        return None
    return planned.memory_gib[rank * layout.stages // ranks]


def _summary(values: Values, planned: float | None) -> Summary:
    ordered = sorted(value for value, _ in values.values())
    lowest = min(values, key=lambda ranks: values[ranks][0])
    return Summary(median(ordered), ordered[0], lowest[0], planned)


def _mismatches(
    summaries: Mapping[str, Summary],
    devices: Sequence[DeviceReport],
    planned: Planned,
    ratio: float,
) -> list[str]:
    """Return the measures whose median is worse than the planner's value."""
    found = [
        measure
        for measure, summary in summaries.items()
        if summary.planned and summary.median * ratio < summary.planned
    ]
    free = sorted(device.free_gib for device in devices if device.free_gib is not None)
    if free and planned.memory_gib and free[len(free) // 2] < max(planned.memory_gib):
        found.append(MEMORY)
    return found


def _left_out(
    findings: Sequence[Finding], layout: RankLayout, *, nodes: int, spares: int
) -> dict[int, Finding]:
    """Return the nodes to leave out: all broken ones, and slow ones for which there are spares."""
    worst: dict[Severity, dict[int, Finding]] = {Severity.BROKEN: {}, Severity.SLOW: {}}
    for finding in findings:  # the worst first
        if finding.severity in worst:
            worst[finding.severity].setdefault(layout.node(finding.ranks[0]), finding)
    broken = worst[Severity.BROKEN]
    slow = {node: each for node, each in worst[Severity.SLOW].items() if node not in broken}
    if _is_common(broken, nodes):
        return {}
    if _is_common(slow, nodes):
        slow = {}
    free = max(0, spares - len(broken))
    return broken | dict(list(slow.items())[:free])


def _is_common(named: Mapping[int, Finding], nodes: int) -> bool:
    """Return True if many nodes have a finding, which points to a common cause."""
    return len(named) > MAX_BLAMED_NODES or (nodes > 1 and 2 * len(named) > nodes)
