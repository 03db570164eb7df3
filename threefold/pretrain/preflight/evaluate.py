"""The result of a preflight: what is broken or slow, and which nodes are left out.

Pure functions, so that every combination can be tested. A rank is compared with the median of the
other ranks, not with the planner's numbers: if all ranks are equally slow, then the planner is
wrong for this cluster, and no node is to blame.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from statistics import median

from models.errors import UserError
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import GIB, stage_memory
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import all_reduce_seconds, matmul_seconds, transfer_seconds

# The result of a preflight: what is broken or slow, and which nodes are left out.


class IssueSeverity(IntEnum):
    """The severity of a issue.

    A shared link or group is slow, but its nodes cannot be told apart; a slow node is slow with
    all its partners; a broken one fails or computes wrong results.
    """

    SHARED = 0
    SLOW = 1
    BROKEN = 2


@dataclass(frozen=True)
class Issue:
    """A measure of some ranks that is worse than that of the others.

    Attributes:
        severity: what is wrong
        ranks: the global ranks, on one node unless the severity is SHARED
        value: the measured value, in unit(measure); None for a broken device
        median_of_others: the median of the others, in unit(measure)
        planned: the planner's value, in unit(measure); None if there is none
        problem: text of a broken device
    """

    severity: IssueSeverity
    measure: str
    ranks: tuple[int, ...]
    value: float | None = None
    median_of_others: float | None = None
    planned: float | None = None
    problem: str = ""

    @property
    def ratio(self) -> float:
        """The median of the others divided by the measured value."""
        return (
            self.median_of_others / self.value
            if self.median_of_others and self.value
            else float("inf")
        )


@dataclass(frozen=True)
class Summary:
    """A measure over all ranks: the median, the lowest value, its first rank, the planned value."""

    median: float
    lowest: float
    rank: int
    planned: float | None = None


@dataclass(frozen=True)
class PreflightResult:
    """The result of a preflight.

    Attributes:
        issues: what is broken or slow, the worst first
        summaries: measure -> its values over all ranks
        mismatches: measures that are worse on all ranks than the planner assumes
        left_out: the nodes that launch.py should not use, by index, with their worst issue
        stops: True if the run must not start on these nodes
    """

    issues: Sequence[Issue] = ()
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    mismatches: Sequence[str] = ()
    left_out: Mapping[int, Issue] = field(default_factory=dict)
    stops: bool = False

    @property
    def has_slow(self) -> bool:
        """True if something seems slow, and nothing is broken: a second measurement may help."""
        return bool(self.issues) and self.issues[0].severity < IssueSeverity.BROKEN


@dataclass(frozen=True)
class RankLayout:
    """The ranks of a run."""

    per_node: int
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """The global ranks of every group whose all-reduces are measured, by measure."""
        axes = {TENSOR: ("tensor",), DATA: ("data", "context")}
        groups = {measure: self.dims.groups(*names) for measure, names in axes.items()}
        return {measure: ranks for measure, ranks in groups.items() if len(ranks[0]) > 1}

    def node(self, rank: int) -> int:
        """Return the index of a rank's node."""
        return rank // self.per_node


# The measures of a preflight, the reports of the ranks, and the pairs of ranks that are measured.
#
# Every rank takes part in the same few rounds, whatever the size of the run. In a round, disjoint
# pairs of ranks exchange messages, so that all links are measured at the same time.

MATMUL, MEMORY = "matmul", "free memory"
NODE_LINK, NETWORK, PIPELINE = "node link", "network link", "pipeline link"
TENSOR, DATA = "tensor all-reduce", "data all-reduce"
UNITS = {MATMUL: "TFLOP/s", MEMORY: "GiB"}  # all others are in GB/s
MAX_BLAMED_NODES = 8  # more that fail or are slow together point to a common cause
MIN_NODES_FOR_FAR_PAIRS = 6  # with fewer, neighbours and distant nodes are often the same
# Set by launch.py: the number of healthy spare nodes. Not set under other launchers.
SPARE_NODES = "THREEFOLD_SPARE_NODES"


def unit(measure: str) -> str:
    """Return the unit of a measure."""
    return UNITS.get(measure, "GB/s")


@dataclass(frozen=True)
class DeviceReport:
    """The device of a rank.

    Attributes:
        device: the driver's name of the device
        tflops: rate of a matmul in the precision of the run; None if the device has failed
        free_gib: free memory before the model is built; None on a CPU
        problem: the error of the device, or its wrong results; empty if there is none
    """

    device: str
    tflops: float | None = None
    free_gib: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class LinkReport:
    """The links of a rank.

    Attributes:
        transfers: scope -> partner of this rank -> GB/s in one direction
        groups: axis -> bus bandwidth in GB/s of the all-reduce of this rank's group
        bytes: scope or axis -> size of the messages
    """

    transfers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """Ranks at equal distances, among which pairs are measured.

    Attributes:
        measure: NODE_LINK, NETWORK or PIPELINE
        size: number of ranks in a line
        stride: distance between neighbouring global ranks of the line
    """

    measure: str
    size: int
    stride: int

    def partner(self, rank: int, pairs: Sequence[tuple[int, int]]) -> int | None:
        """Return the global rank that a rank exchanges messages with; None if it has no partner.

        Args:
            pairs: the pairs of a round, as indices in the line
        """
        own = rank // self.stride % self.size
        for pair in pairs:
            if own in pair:
                return rank + (sum(pair) - 2 * own) * self.stride
        return None


def scopes(world_size: int, per_node: int, stages: int) -> list[Scope]:
    """Return the scopes of a run: within nodes, between nodes, and between pipeline stages.

    Ranks with the same position in their nodes form pairs, so that every network link of a node is
    measured. Stages get pairs of their own only if they are not neighbouring nodes anyway.
    """
    scopes = [
        Scope(NODE_LINK, per_node, 1),
        Scope(NETWORK, world_size // per_node, per_node),
    ]
    span = world_size // stages
    if span > per_node:
        scopes.append(Scope(PIPELINE, stages, span))
    return [scope for scope in scopes if scope.size > 1]


def pair_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which each of `size` members gets two partners or more.

    A slow member is slow with all its partners, and each of its partners is fast with another one.
    Members form pairs with both neighbours on a ring, and with a distant member if there are many,
    because a member between two slow ones would otherwise seem slow. Two members are one pair.
    """
    if size < 2:
        return []
    if size == 2:
        return [[(0, 1)]]
    rounds = [
        [(first, first + 1) for first in range(0, size - 1, 2)],
        [(first, first + 1) for first in range(1, size - 1, 2)],
    ]
    closing = (0, size - 1)
    if size % 2:
        rounds.append([closing])
    else:
        rounds[1].append(closing)
    if size >= MIN_NODES_FOR_FAR_PAIRS:
        half = size // 2
        rounds.append([(first, first + half) for first in range(half)])
    return rounds


def best_of(
    first: tuple[list[DeviceReport], list[LinkReport]],
    second: tuple[list[DeviceReport], list[LinkReport]],
) -> tuple[list[DeviceReport], list[LinkReport]]:
    """Return the better values of two measurements of the ranks, and the problems of both.

    A disturbance that lasts only for a moment does not make a node slow.
    """
    devices = [
        replace(
            one,
            tflops=_larger(one.tflops, other.tflops),
            free_gib=_larger(one.free_gib, other.free_gib),
            problem=one.problem or other.problem,
        )
        for one, other in zip(first[0], second[0], strict=True)
    ]
    if not first[1] or not second[1]:
        return devices, []
    links = [
        replace(
            one,
            transfers={
                measure: {
                    partner: max(rate, other.transfers[measure][partner])
                    for partner, rate in rates.items()
                }
                for measure, rates in one.transfers.items()
            },
            groups={axis: max(rate, other.groups[axis]) for axis, rate in one.groups.items()},
        )
        for one, other in zip(first[1], second[1], strict=True)
    ]
    return devices, links


def _larger(one: float | None, other: float | None) -> float | None:
    known = [value for value in (one, other) if value is not None]
    return max(known, default=None)


# The planner's numbers for the measures of a preflight.


@dataclass(frozen=True)
class Planned:
    """The planner's numbers; all are empty for devices without a datasheet and for CPUs.

    Attributes:
        rates: measure -> TFLOP/s or GB/s
        memory_gib: memory that the ranks of each pipeline stage need, without that of CUDA itself
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    memory_gib: tuple[float, ...] = ()


def planned(
    recipe: Recipe,
    dims: ParallelDims,
    machine: Machine | None,
    *,
    precision: str,
    matmul_size: int,
    links: LinkReport,
) -> Planned:
    """Return the planner's numbers.

    Args:
        machine: the GPUs of the run; None if they have no datasheet
        links: the links of a rank, for the sizes of the messages
    """
    if machine is None or machine.gpu.device == "cpu":  # CPUs differ too much
        return Planned()
    predicted = [TENSOR, DATA]
    # All pairs of an NCCL communicator get as few channels as its slowest pair (NCCL's
    # src/graph/paths.cc). Pairs therefore reach the planner's rates only in a world of one node.
    if dims.world_size <= machine.gpus_per_node:
        predicted.append(NODE_LINK)
    rates = {
        measure: _link_rate(measure, machine, dims, size)
        for measure, size in links.bytes.items()
        if measure in predicted
    }
    if precision in machine.gpu.peak_tflops:
        size, gpu = matmul_size, THREEFOLD.kernels_on(machine.gpu)
        seconds = matmul_seconds(gpu, precision, rows=size, columns=size, inner=size)
        rates[MATMUL] = 2e-12 * size**3 / seconds
    try:
        stages = stage_memory(job_of(recipe, machine))
    except UserError:  # the planner rejects what the engine accepts
        return Planned(rates)
    context = machine.gpu.context_gib
    return Planned(rates, tuple(stage.total / GIB - context for stage in stages))


def _link_rate(measure: str, machine: Machine, dims: ParallelDims, size: int) -> float:
    """Return the rate of messages of `size` bytes in GB/s, as in `LinkReport`."""
    if measure == NODE_LINK:
        return 1e-9 * size / transfer_seconds(machine, size, stride=1)
    ranks, stride = {
        TENSOR: (dims.tensor, 1),
        DATA: (dims.dp_cp_size, dims.tensor),
    }[measure]
    seconds = all_reduce_seconds(machine, size, ranks=ranks, stride=stride)
    return 1e-9 * size * 2 * (ranks - 1) / ranks / seconds


MEMORY_MARGIN_GIB = 2.0  # of free memory, by which healthy devices may differ


def evaluate(
    devices: Sequence[DeviceReport],
    *,
    links: Sequence[LinkReport],
    layout: RankLayout,
    planned: Planned,
    ratio: float,
    spares: int = 0,
) -> PreflightResult:
    """Return the result.

    Args:
        links: the links of each rank; empty if they were not measured
        ratio: a rank is slow if its value times `ratio` is below the median of the others
    """
    measured = _measured(devices, links, layout)
    issues = _issues(measured, devices, layout, planned, ratio)
    summaries = {
        measure: _summary(values, planned.rates.get(measure))
        for measure, values in measured.items()
        if values
    }
    nodes = -(-len(devices) // layout.per_node)
    left_out = _left_out(issues, layout, nodes=nodes, spares=spares)
    broken = any(issue.severity == IssueSeverity.BROKEN for issue in issues)
    return PreflightResult(
        issues,
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
    values: dict[str, Values] = {MATMUL: {}}
    for rank, device in enumerate(devices):
        if device.tflops is not None and not device.problem:
            values[MATMUL][(rank,)] = (device.tflops, True)
    for rank, report in enumerate(links):
        for measure, rates in report.transfers.items():
            # A rank's fastest partner counts, because slower partners may themselves be at fault.
            # If a rank has only one partner, on another node, it is unclear which of the two nodes
            # is slow.
            ranks = tuple(sorted((rank, *rates))) if len(rates) == 1 else (rank,)
            within = layout.node(ranks[0]) == layout.node(ranks[-1])
            if rates:
                values.setdefault(measure, {})[ranks] = (max(rates.values()), within)
    for axis, groups in layout.groups.items():
        for members in groups if links else ():
            within = layout.node(members[0]) == layout.node(members[-1])
            rate = min(links[rank].groups[axis] for rank in members)
            values.setdefault(axis, {})[tuple(members)] = (rate, within)
    return values


def _issues(
    measured: Mapping[str, Values],
    devices: Sequence[DeviceReport],
    layout: RankLayout,
    planned: Planned,
    ratio: float,
) -> list[Issue]:
    """Return what is broken or slow, the worst first."""
    issues = [
        Issue(IssueSeverity.BROKEN, MATMUL, (rank,), problem=device.problem)
        for rank, device in enumerate(devices)
        if device.problem
    ]
    blamed = {layout.node(issue.ranks[0]) for issue in issues}
    for measure, values in measured.items():
        expected = planned.rates.get(measure)
        slow = [
            issue
            for comparable in _comparable(measure, values, devices)
            for issue in _slow(measure, comparable, expected, ratio)
        ]
        own = [issue for issue in slow if issue.severity == IssueSeverity.SLOW]
        blamed |= {layout.node(issue.ranks[0]) for issue in own}
        # A slow node explains the slow links and groups that it shares with other nodes.
        issues += own + [
            issue
            for issue in slow
            if issue.severity == IssueSeverity.SHARED
            and blamed.isdisjoint(layout.node(rank) for rank in issue.ranks)
        ]
    issues += _short_of_memory(devices, layout, planned)
    return sorted(issues, key=lambda issue: (-issue.severity, -issue.ratio, issue.ranks))


def _comparable(measure: str, values: Values, devices: Sequence[DeviceReport]) -> Iterator[Values]:
    """Yield the values that should be equal: matmul rates only of devices with the same name."""
    if measure != MATMUL:
        yield values
        return
    for name in {device.device for device in devices}:
        yield {ranks: value for ranks, value in values.items() if devices[ranks[0]].device == name}


def _slow(measure: str, values: Values, planned: float | None, ratio: float) -> list[Issue]:
    """Return the issues of a measure: values below the median of the others / `ratio`."""
    ordered = sorted(value for value, _ in values.values())
    issues = []
    for ranks, (value, blames) in values.items():
        others = median_of_others(ordered, value)
        if others is not None and value * ratio < others:
            severity = IssueSeverity.SLOW if blames else IssueSeverity.SHARED
            issues.append(Issue(severity, measure, ranks, value, others, planned))
    return issues


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
) -> Iterable[Issue]:
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
            stage = rank * layout.dims.pipeline // len(devices)
            planned_gib = planned.memory_gib[stage] if planned.memory_gib else None
            yield Issue(IssueSeverity.SLOW, MEMORY, (rank,), device.free_gib, others, planned_gib)


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
    measures = [
        measure
        for measure, summary in summaries.items()
        if summary.planned and summary.median * ratio < summary.planned
    ]
    free = sorted(device.free_gib for device in devices if device.free_gib is not None)
    if free and planned.memory_gib and free[len(free) // 2] < max(planned.memory_gib):
        measures.append(MEMORY)
    return measures


def _left_out(
    issues: Sequence[Issue], layout: RankLayout, *, nodes: int, spares: int
) -> dict[int, Issue]:
    """Return the nodes to leave out: all broken ones, and slow ones for which there are spares."""
    worst: dict[IssueSeverity, dict[int, Issue]] = {
        IssueSeverity.BROKEN: {},
        IssueSeverity.SLOW: {},
    }
    for issue in issues:  # the worst first
        if issue.severity in worst:
            worst[issue.severity].setdefault(layout.node(issue.ranks[0]), issue)
    broken = worst[IssueSeverity.BROKEN]
    slow = {node: issue for node, issue in worst[IssueSeverity.SLOW].items() if node not in broken}
    if _is_common(broken, nodes):
        return {}
    if _is_common(slow, nodes):
        slow = {}
    free = max(0, spares - len(broken))
    return broken | dict(list(slow.items())[:free])


def _is_common(named: Mapping[int, Issue], nodes: int) -> bool:
    """Return True if many nodes have a issue, which points to a common cause."""
    return len(named) > MAX_BLAMED_NODES or (nodes > 1 and 2 * len(named) > nodes)
