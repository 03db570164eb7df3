"""The preflight of a run: measure the devices and links, evaluate the measurements, and report.

All ranks measure at the same time and in the same order, so that the duration hardly depends on
their number. The transfers use the communicator of the world, and the all-reduces the groups that
training needs anyway: no group is created. Only one communicator is busy at a time, because each
rank waits for its device after every operation. Of several repetitions, the fastest one counts,
because disturbances only make them slower, and a faulty device or link is slow in all of them.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from models.errors import UserError
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.axes import ParallelAxes
from threefold.engine.build import DTYPES
from threefold.gpus.datasheet import rounded
from threefold.pretrain.experiment import Experiment, machine_of
from threefold.pretrain.preflight.evaluate import (
    DATA,
    MATMUL,
    MAX_BLAMED_NODES,
    MEMORY,
    SPARE_NODES,
    TENSOR,
    DeviceReport,
    Issue,
    IssueSeverity,
    LinkReport,
    Planned,
    PreflightResult,
    RankLayout,
    Scope,
    Summary,
    best_of,
    evaluate,
    pair_rounds,
    planned,
    scopes,
    unit,
)
from threefold.pretrain.setup import RunHandle
from threefold.runtime.exits import UNFIT, exit_now
from threefold.runtime.processes import RankTree, driver_name, on_gpu
from threefold.runtime.timing import (
    Repetitions,
    matmul_tflops,
    time_all_reduce,
    time_transfer,
)
from threefold.supervision.supervisor import Supervisor
from threefold.tracking.clocks import Startup

# The measurements: the device, transfers and all-reduces of the ranks.

MATMUL_SIZE = {"cpu": 256, "cuda": 8192}  # rows, columns and inner dimension, by kind of device
MATMUL_SIZE_FP32 = 4096  # on GPUs, where fp32 is up to 16 times slower
CHECKED_SIZE = {"cpu": 256, "cuda": 4096}  # likewise, of the matmuls whose results are checked
CHECKED_MATMULS = 4
ENTRIES_PER_NONZERO = 8  # one entry in eight is 1 or -1, the others are 0
PROBE_BYTES = {"cpu": 2**16, "cuda": 2**22}  # of a first message, which also connects the ranks
MESSAGE_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of the measured messages, if there is enough time
REPETITIONS = 3  # of a transfer or an all-reduce
SECONDS_PER_ROUND = 0.2
GIB = 2**30


def matmul_size(device: torch.device, precision: str) -> int:
    """Return the rows, columns and inner dimension of the measured matmul."""
    if device.type == "cuda" and precision == "fp32":
        return MATMUL_SIZE_FP32
    return MATMUL_SIZE[device.type]


def release_memory(device: torch.device) -> None:
    """Return the memory of the measurements to the device, and forget their peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_device(precision: str, device: torch.device) -> DeviceReport:
    """Measure the device of this rank, and check its results."""
    name, rate, free = driver_name(), None, None
    try:
        free = torch.cuda.mem_get_info(device)[0] / GIB if device.type == "cuda" else None
        size = matmul_size(device, precision)
        rate = matmul_tflops(size, DTYPES[precision], device, choose=min)
        wrong = wrong_rows(CHECKED_SIZE[device.type], precision, device)
        release_memory(device)
    except RuntimeError as error:  # of CUDA, including a lack of memory
        return DeviceReport(name, rate, free, str(error).strip().partition("\n")[0])
    problem = f"{wrong} rows of matmuls have wrong results" if wrong else ""
    return DeviceReport(name, rate, free, problem)


def wrong_rows(
    size: int,
    precision: str,
    device: torch.device,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm,
) -> int:
    """Return the number of wrong rows in products of matrices of small integers.

    All sums of the products are integers of at most 256, which every precision represents exactly,
    so that the order of the additions does not matter. Each product is multiplied by a vector, and
    compared with the product of one matrix by the other times the vector (Freivalds 1977), in fp64,
    where this is exact, too. No other device is needed for the comparison.
    """
    generator = torch.Generator(device).manual_seed(0)

    def integers() -> torch.Tensor:  # [size, size], of -1, 0 and 1
        drawn = torch.randint(
            0, 2 * ENTRIES_PER_NONZERO, (size, size), device=device, generator=generator
        )
        return (drawn == 0).to(DTYPES[precision]) - (drawn == 1).to(DTYPES[precision])

    wrong = 0
    for _ in range(CHECKED_MATMULS):
        left, right = integers(), integers()
        vector = torch.randint(1, 1000, (size,), device=device, generator=generator).double()
        expected = left.double() @ (right.double() @ vector)  # [size]
        computed = multiply(left, right).double() @ vector  # [size]
        wrong += int((computed != expected).sum())  # NaN differs from everything
    return wrong


class LinkTest:
    """Times transfers and all-reduces; all methods are collective.

    Args:
        note: called with a description of each measurement, for hang reports
    """

    def __init__(self, rank: int, device: torch.device, note: Callable[[str], None]):
        self.rank, self.device, self.note = rank, device, note

    def measure(
        self, scopes: list[Scope], groups: Mapping[str, dist.ProcessGroup | None]
    ) -> LinkReport:
        """Return the rates of this rank.

        Args:
            scopes: the scopes of the transfers, the same on all ranks
            groups: axis -> this rank's group of several ranks; the same axes on all ranks
        """
        transfers: dict[str, dict[int, float]] = {}
        all_reduces: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for scope in scopes:
            rates = transfers[scope.measure] = {}
            for pairs in pair_rounds(scope.size):
                partner = scope.partner(self.rank, pairs)
                seconds, size = self._transfer(scope.measure, partner)
                sizes[scope.measure] = min(size, sizes.get(scope.measure, size))
                if partner is not None and seconds is not None:
                    rates[partner] = 1e-9 * size / seconds
        for axis, group in groups.items():
            seconds, size = self._time(axis, partial(time_all_reduce, group=group))
            ranks = dist.get_world_size(group)
            sizes[axis] = size
            if seconds is not None:  # NCCL's bus bandwidth
                all_reduces[axis] = 1e-9 * size * 2 * (ranks - 1) / ranks / seconds
        return LinkReport(transfers, all_reduces, sizes)

    def _transfer(self, measure: str, partner: int | None) -> tuple[float | None, int]:
        """Time a transfer in one direction; return the seconds and the size of the message."""
        if partner is None:
            return self._time(measure, None)
        pair = (min(self.rank, partner), max(self.rank, partner))
        return self._time(
            f"{measure} between rank {pair[0]} and rank {pair[1]}",
            partial(time_transfer, pair=pair, rank=self.rank),
        )

    def _time(self, name: str, seconds_of: Callable[..., float] | None) -> tuple[float | None, int]:
        """Time an operation; return the seconds and the size of its message.

        First send a message of PROBE_BYTES untimed, which connects the ranks, and then a timed one.
        The slowest rank's time sets the size of the measured messages, so that a round stays below
        SECONDS_PER_ROUND.

        Args:
            name: the measurement, for hang reports
            seconds_of: times the operation, given the size of the message, the device and the
                repetitions; None if this rank has no partner, so that the seconds are None, too
        """
        self.note(f"preflight: {name}")
        probe = PROBE_BYTES[self.device.type]
        seconds = self._seconds(seconds_of, probe, repetitions=1)
        slowest = torch.tensor(seconds or 0.0, dtype=torch.float32, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        size = message_bytes(slowest.item(), probe, MESSAGE_BYTES[self.device.type])
        return self._seconds(seconds_of, size, repetitions=REPETITIONS), size

    def _seconds(
        self, seconds_of: Callable[..., float] | None, size: int, repetitions: int
    ) -> float | None:
        if seconds_of is None:
            return None
        return seconds_of(size, self.device, Repetitions(repetitions, choose=min))


def message_bytes(seconds: float, probe: int, most: int) -> int:
    """Return the size of the messages with which a round stays below SECONDS_PER_ROUND.

    Args:
        seconds: time of the slowest message of `probe` bytes
        probe: size of the first messages
    """
    size = most
    while size > probe and seconds * size / probe * (1 + REPETITIONS) > SECONDS_PER_ROUND:
        size //= 4
    return max(size, probe)


# The messages and the event of a preflight.

MAX_ISSUES_SHOWN = 8


def healthy_line(result: PreflightResult, hosts: Sequence[str], seconds: float) -> str:
    """Return a line with the median of each measure, and the slowest device."""
    parts = []
    for measure, summary in result.summaries.items():
        part = f"{measure} {number(summary.median)} {unit(measure)}"
        details = []
        if measure == MATMUL and len(hosts) > 1:
            rank = summary.rank
            details.append(f"slowest {number(summary.lowest)} on rank {rank} ({hosts[rank]})")
        if summary.planned:
            details.append(f"planned {number(summary.planned)}")
        parts.append(part + (f" ({', '.join(details)})" if details else ""))
    return f"preflight: {'; '.join(parts)}; in {seconds:.1f} s"


def warnings(result: PreflightResult, hosts: Sequence[str]) -> list[str]:
    """Return a sentence for each issue and each mismatch with the planner.

    At most MAX_ISSUES_SHOWN issues are in the list.

    Args:
        hosts: name of the host of each rank
    """
    lines = [f"preflight: {sentence(issue, hosts)}" for issue in result.issues]
    more = len(lines) - MAX_ISSUES_SHOWN
    if more > 0:
        lines[MAX_ISSUES_SHOWN:] = [f"preflight: {more} more issues of this kind"]
    return lines + [
        f"preflight: {mismatch(measure, result.summaries.get(measure))}"
        for measure in result.mismatches
    ]


def sentence(issue: Issue, hosts: Sequence[str]) -> str:
    """Return an issue as a sentence."""
    ranks, measure = issue.ranks, issue.measure
    names = dict.fromkeys(hosts[rank] for rank in ranks)
    numbers = shortened(map(str, ranks))
    who = f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers} ({shortened(names)})"
    if issue.severity == IssueSeverity.BROKEN:
        return f"{who}: {issue.problem}"
    assert issue.value is not None and issue.median_of_others is not None
    of = unit(measure)
    planned = f", planned {number(issue.planned)} {of}" if issue.planned else ""
    if measure == MEMORY:
        return (
            f"{who}: {number(issue.value)} {of} of memory are free, the median of the others is "
            f"{number(issue.median_of_others)} {of}{planned}; another process may use the device"
        )
    shared = "; the nodes cannot be told apart" if issue.severity == IssueSeverity.SHARED else ""
    return (
        f"{who}: {measure} {number(issue.value)} {of}, the median of the others is "
        f"{number(issue.median_of_others)} {of}{planned}{shared}"
    )


def shortened(names: Iterable[str]) -> str:
    """Return names for a message, at most MAX_ISSUES_SHOWN of them."""
    known = list(names)
    return ", ".join(known[:MAX_ISSUES_SHOWN]) + (", ..." if len(known) > MAX_ISSUES_SHOWN else "")


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
        f"clocks and network settings, or measure the cluster with sweep.py links NAME"
    )


def event(
    result: PreflightResult, layout: RankLayout, hosts: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Return the facts of the event `preflight`, at most MAX_ISSUES_SHOWN issues of them."""
    facts: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "measures": {name: _summary(summary, hosts) for name, summary in result.summaries.items()},
    }
    if result.issues:
        facts["issues"] = [sentence(issue, hosts) for issue in result.issues[:MAX_ISSUES_SHOWN]]
    if result.mismatches:
        facts["below_plan"] = list(result.mismatches)
    if result.left_out:
        facts["left_out"] = [
            {
                "rank": node * layout.per_node,
                "reason": sentence(issue, hosts),
                "broken": issue.severity == IssueSeverity.BROKEN,
            }
            for node, issue in result.left_out.items()
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


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{rounded(value):,g}"


# The order of the measurements, and the end of the preflight.

SECONDS_WITHOUT_PROGRESS = 60  # after which supervision ends a preflight that hangs
EXCHANGE_TIMEOUT = timedelta(minutes=10)
Measured = tuple[list[DeviceReport], list[LinkReport]]


def check_nodes(
    experiment: Experiment, *, handle: RunHandle, axes: ParallelAxes, step: int, startup: Startup
) -> None:
    """Measure the devices and links of all ranks, and name slow or broken nodes; collective.

    The process ends with exit code UNFIT if a device is broken, or if launch.py can replace a slow
    node by a spare one.

    Args:
        step: the last step that is done
    """
    recipe, world = experiment.recipe, experiment.world
    wanted = recipe.supervision.preflight
    if not (on_gpu() if wanted == "auto" else wanted):
        return
    with hang_limit(handle.supervisor):
        test = Preflight(experiment, handle, axes)
        result = test.run()
        if world.rank == 0:
            with handle.supervisor.crumb.waiting_for_disk("writing the result of the preflight"):
                report(handle, result, test, step)
        stops = test.tree.broadcast(result.stops)
    startup.mark("preflight")
    if stops:  # nothing more must be asked of a device that may have failed
        exit_now(UNFIT)
    release_memory(test.device)


@contextmanager
def hang_limit(supervisor: Supervisor) -> Iterator[None]:
    """Let supervision end a hang after SECONDS_WITHOUT_PROGRESS instead of the start-up's limit."""
    limit = supervisor.limit
    # Building the axes may have taken longer than the lower limit, which would end this rank now.
    supervisor.crumb.note("preflight: connecting the ranks")
    supervisor.limit = min(limit, SECONDS_WITHOUT_PROGRESS)  # 0: no limit
    try:
        yield
    finally:
        supervisor.crumb.note("building the engine")
        supervisor.limit = limit


def ranks_per_node(world: LaunchEnvironment, tree: RankTree) -> int:
    """Return the number of ranks on each node; that of all ranks if nodes differ. Collective.

    The result is the same on all ranks. If each used the number on its own node, the ranks of
    different nodes would take part in different rounds and wait for each other forever.
    """
    sizes = set(tree.gather(world.local_size).values())  # empty except on rank 0
    size = tree.broadcast(sizes.pop() if len(sizes) == 1 else world.size)
    return size if world.size % size == 0 else world.size


class Preflight:
    """The measurements of the ranks; the constructor and the methods are collective."""

    def __init__(self, experiment: Experiment, handle: RunHandle, axes: ParallelAxes):
        self.experiment, self.hosts = experiment, handle.supervisor.hosts
        self.note = handle.supervisor.crumb.note
        self.device = torch.device(get_accelerator().current_device_name())
        self.tree = RankTree(EXCHANGE_TIMEOUT)
        self.layout = RankLayout(ranks_per_node(experiment.world, self.tree), axes.dims)
        groups = {TENSOR: axes.tensor.group, DATA: axes.data_group}
        self.groups = {measure: groups[measure] for measure in self.layout.groups}
        self.seconds = 0.0

    def run(self) -> PreflightResult:
        """Measure and evaluate.

        If anything seems slow, all measurements are repeated, and the better result of each counts.

        Returns:
            The result on rank 0, and an empty one on the others.
        """
        began = time.monotonic()
        measured = self._measure()
        result = self._evaluate(measured)
        if self.tree.broadcast(result.has_slow):
            again = self._measure()
            result = self._evaluate(best_of(measured, again))
        self.seconds = time.monotonic() - began
        return result

    def _measure(self) -> Measured:
        """Measure the devices, and the links if all devices work; the results are on rank 0."""
        self.note("preflight: matmuls")
        precision = self.experiment.precision
        devices = list(self.tree.gather(measure_device(precision, self.device)).values())
        if self.tree.broadcast(any(device.problem for device in devices)):
            return devices, []
        size, dims = self.experiment.world.size, self.experiment.dims
        test = LinkTest(self.experiment.world.rank, self.device, self.note)
        measured = test.measure(scopes(size, self.layout.per_node, dims.pipeline), self.groups)
        return devices, list(self.tree.gather(measured).values())

    def _evaluate(self, measured: Measured) -> PreflightResult:
        """Return the result on rank 0, and an empty one on the others."""
        if self.experiment.world.rank != 0:
            return PreflightResult()
        devices, links = measured
        return evaluate(
            devices,
            links=links,
            layout=self.layout,
            planned=self._planned(links[0] if links else LinkReport()),
            ratio=self.experiment.recipe.supervision.preflight_ratio,
            spares=int(os.environ.get(SPARE_NODES, 0)),
        )

    def _planned(self, links: LinkReport) -> Planned:
        """Return the planner's numbers; none if the GPU of the recipe has no datasheet."""
        try:
            machine = machine_of(self.experiment, driver_name())
        except UserError:
            machine = None
        return planned(
            self.experiment.recipe,
            self.experiment.dims,
            machine,
            precision=self.experiment.precision,
            matmul_size=matmul_size(self.device, self.experiment.precision),
            links=links,
        )


def report(handle: RunHandle, result: PreflightResult, test: Preflight, step: int) -> None:
    """Print and record the result; on rank 0."""
    folder, hosts = handle.folder, test.hosts
    folder.event("preflight", step, **event(result, test.layout, hosts, test.seconds))
    if result.issues or result.mismatches:
        print("\n".join(warnings(result, hosts)), file=sys.stderr, flush=True)
    else:
        print(f"  {healthy_line(result, hosts, test.seconds)}", flush=True)
    if not result.stops:
        return
    nodes = ", ".join(dict.fromkeys(hosts[issue.ranks[0]] for issue in result.left_out.values()))
    if SPARE_NODES in os.environ and nodes:
        reason = f"preflight: launch.py continues without {nodes}"
    elif nodes:
        reason = (
            f"preflight: broken nodes: {nodes}; leave them out and rerun the same command, or use "
            f"--set supervision.preflight=false to train on them anyway"
        )
    else:
        reason = (
            f"preflight: more than {MAX_BLAMED_NODES} nodes, or more than half of them, compute "
            f"wrong results or fail, so the driver or a library is the likely cause; repair it and "
            f"rerun the same command"
        )
    folder.event("stop", step, reason=reason, exit_code=UNFIT)
    print(f"stopped: {reason}", file=sys.stderr, flush=True)
