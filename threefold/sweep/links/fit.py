"""Measurements of links and matmul rates, the fit to them, and the datasheet written from it.

The planner's time of a transfer or an all-reduce is linear in two unknowns, the inverse rate of a
link and its latency:

    seconds = rate coefficient / rate + latency coefficient * latency + fixed seconds

The coefficients are read off `threefold/plan/time/block.py`, so that the fit follows its
formulas. It is a least-squares fit of relative errors, because the sizes differ by a factor of 256
or more.
"""

import contextlib
import itertools
import os
import re
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import log, sqrt
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple, get_args

from models.errors import UserError
from threefold.gpus.datasheet import MEASURED_MARK, Gpu, datasheet_text, file_of, read_gpu, rounded
from threefold.plan.job import Machine
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import all_reduce_seconds, matmul_seconds, transfer_seconds
from threefold.run_folder.json_lines import write_whole

# The measurements.

Operation = Literal["transfer", "all-reduce"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
SIZES = {"cpu": (2**16, 2**20, 2**24), "cuda": (2**20, 2**25, 2**29)}  # bytes, by kind of device
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}  # rows, columns and inner dimension


@dataclass(frozen=True, kw_only=True)
class LinkTime:
    """Median time of a transfer between two ranks, or of an all-reduce.

    Attributes:
        across_nodes: True if the ranks are on several nodes
        bytes: size of the tensor on each rank
        seconds: time of one transfer in one direction, or of one all-reduce
    """

    operation: Operation
    across_nodes: bool
    ranks: int
    bytes: int
    seconds: float

    @property
    def bus_gigabytes_per_second(self) -> float:
        """Rate of each rank's link in one direction: NCCL's bus bandwidth."""
        share = 1.0
        if self.operation == "all-reduce":
            share = 2 * (self.ranks - 1) / self.ranks
        return 1e-9 * share * self.bytes / self.seconds


class RankRate(NamedTuple):
    """The host of a rank and the rate of its matmul."""

    host: str
    tflops: float

    @classmethod
    def here(cls, tflops: float) -> "RankRate":
        """Return the rate of a rank of this host."""
        return cls(socket.gethostname(), tflops)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The measurements of the ranks.

    Attributes:
        device: name of the device, as the driver reports it; of a CPU, its model
        matmul_size: rows, columns and inner dimension of the matmul
        links: the times of all transfers and all-reduces
    """

    device: str
    torch: str
    precision: str
    matmul_size: int
    rates: list[RankRate]
    links: list[LinkTime]

    @property
    def median_tflops(self) -> float:
        """The median matmul rate of the ranks."""
        return median(rate.tflops for rate in self.rates)

    @property
    def slowest(self) -> tuple[int, RankRate]:
        """The rank with the lowest matmul rate, and its rate."""
        return min(enumerate(self.rates), key=lambda ranked: ranked[1].tflops)

    @property
    def inside_nodes(self) -> list[LinkTime]:
        """The times of ranks on the same node; empty if each node has a single rank."""
        return [time for time in self.links if not time.across_nodes]

    @property
    def across_nodes(self) -> list[LinkTime]:
        """The times of ranks on several nodes; empty on a single node."""
        return [time for time in self.links if time.across_nodes]

    def or_shorter(self, other: "Measurements") -> "Measurements":
        """Return these measurements, with the times of others where those are shorter."""
        pairs = zip(self.links, other.links, strict=True)
        links = [min(pair, key=lambda time: time.seconds) for pair in pairs]
        return replace(self, links=links)


# The fit.

UNLIMITED = float("inf")  # rate of a link that takes no time
ROUNDS = 30  # of the fit; it converges to three digits within ten
MEASUREMENTS = 5  # at most, on nodes that other programs use
NO_GROWTH = "the measured times do not grow with the size of the messages"


class FitFailed(Exception):
    """The measured times do not grow with the size of the messages."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Reached rates in GB/s per GPU and in one direction, and latencies in seconds."""

    node_rate: float
    node_latency: float
    network_rate: float
    network_latency: float

    @classmethod
    def of(cls, gpu: Gpu) -> "Links":
        """Return the links that the planner assumes for a GPU."""
        return cls(
            node_rate=gpu.node_link_gigabytes_per_second * gpu.node_link_efficiency,
            node_latency=gpu.node_link_latency_seconds,
            network_rate=gpu.network_gigabytes_per_second * gpu.network_efficiency,
            network_latency=gpu.network_latency_seconds,
        )


@dataclass(frozen=True)
class Equation:
    """One measurement: its seconds, and the coefficients of the planner's formula."""

    rate: float
    latency: float
    fixed: float
    seconds: float


@dataclass(frozen=True)
class LinkFit:
    """Predicts transfers and all-reduces of nodes with `gpus_per_node` GPUs, and fits links."""

    gpu: Gpu
    gpus_per_node: int

    def predict(self, links: Links, time: LinkTime, size: float | None = None) -> float:
        """Return the planner's seconds of a measured operation; `size` replaces its bytes."""
        gpu = replace(
            self.gpu,
            node_link_gigabytes_per_second=links.node_rate,
            node_link_efficiency=1.0,
            node_link_latency_seconds=links.node_latency,
            network_gigabytes_per_second=links.network_rate,
            network_efficiency=1.0,
            network_latency_seconds=links.network_latency,
        )
        machine = Machine.of(gpu, gpus=time.ranks, gpus_per_node=self.gpus_per_node)
        moved = time.bytes if size is None else size
        if time.operation == "all-reduce":
            return all_reduce_seconds(machine, moved, ranks=time.ranks, stride=1)
        return transfer_seconds(
            machine, moved, stride=self.gpus_per_node if time.across_nodes else 1
        )

    def fit(self, times: Sequence[LinkTime]) -> Links:
        """Return the links that reproduce the times best; links without times stay.

        Raises:
            FitFailed: times do not grow with the size of the messages.
        """
        check_growth(times)
        links = Links.of(self.gpu)
        if inside := [time for time in times if not time.across_nodes]:
            free = replace(links, node_rate=UNLIMITED, node_latency=0.0)
            one = replace(free, node_rate=1.0), replace(free, node_latency=1.0)
            rate, latency = solve(self._equations(inside, free, *one))
            links = replace(links, node_rate=rate, node_latency=latency)
        if across := [time for time in times if time.across_nodes]:
            links = self._fit_network(across, links)
        return links

    def _fit_network(self, times: Sequence[LinkTime], links: Links) -> Links:
        """Return the links with the network that reproduces the times best.

        An all-reduce across nodes is limited by the network or by the links within the nodes,
        whichever is slower. The fit assumes the first, the second, and that both are equal, and
        keeps the best result.
        """
        known = replace(links, network_rate=UNLIMITED, network_latency=0.0)
        unlimited = replace(known, node_rate=UNLIMITED)
        fitted = []
        for free in (unlimited, known):
            one = replace(unlimited, network_rate=1.0), replace(unlimited, network_latency=1.0)
            equations = self._equations(times, free, *one)
            if free is known:  # the rate of the network decides only the transfers
                equations = [
                    replace(equation, rate=0.0) if time.operation == "all-reduce" else equation
                    for equation, time in zip(equations, times, strict=True)
                ]
            with contextlib.suppress(FitFailed):
                fitted.append(solve(equations))
        if not fitted:
            raise FitFailed(NO_GROWTH)
        equal = links.node_rate / self.gpus_per_node
        fitted.append(solve(self._equations(times, unlimited, *one), rate=equal))
        candidates = [
            replace(links, network_rate=rate, network_latency=latency) for rate, latency in fitted
        ]
        return min(candidates, key=lambda each: self.error(each, times))

    def error(self, links: Links, times: Sequence[LinkTime]) -> float:
        """Return the sum of the squared logarithms of predicted over measured seconds."""
        return sum(log(self.predict(links, time) / time.seconds) ** 2 for time in times)

    def _equations(
        self, times: Sequence[LinkTime], free: Links, one_rate: Links, one_latency: Links
    ) -> list[Equation]:
        """Return an equation for each time.

        Args:
            free: links whose unknown rate is unlimited, without latency
            one_rate: links with an unknown rate of 1 GB/s, and all others unlimited
            one_latency: links with an unknown latency of 1 second
        """
        return [
            Equation(
                rate=self.predict(one_rate, time),
                latency=self.predict(one_latency, time, size=0.0),
                fixed=self.predict(free, time),
                seconds=time.seconds,
            )
            for time in times
        ]


def check_growth(times: Sequence[LinkTime]) -> None:
    """Check that the largest message of each operation takes longer than the smallest.

    Raises:
        FitFailed: it does not.
    """
    by_operation: dict[tuple[str, bool], list[LinkTime]] = {}
    for time in times:
        by_operation.setdefault((time.operation, time.across_nodes), []).append(time)
    for of_operation in by_operation.values():
        ordered = sorted(of_operation, key=lambda time: time.bytes)
        if ordered[-1].seconds <= ordered[0].seconds:
            raise FitFailed(NO_GROWTH)


def solve(equations: Sequence[Equation], rate: float | None = None) -> tuple[float, float]:
    """Return the rate in GB/s and the latency in seconds with the least squares of errors.

    Each error is divided by the geometric mean of the measured and the predicted seconds, so that
    twice as long and half as long are equal errors. The predictions are those of the round before.

    Args:
        equations: one for each measurement
        rate: rate that is already known

    Raises:
        FitFailed: the rate would not be positive.
    """
    scales = [equation.seconds for equation in equations]
    for _ in range(ROUNDS):
        inverse, latency = solve_scaled(equations, scales, rate)
        scales = [
            sqrt(
                (equation.rate * inverse + equation.latency * latency + equation.fixed)
                * equation.seconds
            )
            for equation in equations
        ]
    return 1 / inverse, latency


def solve_scaled(
    equations: Sequence[Equation], scales: Sequence[float], rate: float | None
) -> tuple[float, float]:
    """Return the inverse rate and the latency with the least squares of errors / scale."""
    pairs = list(zip(equations, scales, strict=True))
    a = [equation.rate / scale for equation, scale in pairs]
    b = [equation.latency / scale for equation, scale in pairs]
    c = [(equation.seconds - equation.fixed) / scale for equation, scale in pairs]
    aa, ab, bb = dot(a, a), dot(a, b), dot(b, b)
    ac, bc = dot(a, c), dot(b, c)
    if rate is not None:
        return 1 / rate, max(0.0, (bc - ab / rate) / bb)
    latency = (aa * bc - ab * ac) / (aa * bb - ab * ab)
    latency = max(0.0, latency)  # noise may make it negative
    inverse = (ac - ab * latency) / aa
    if inverse <= 0:
        raise FitFailed(NO_GROWTH)
    return inverse, latency


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the sum of the products of two sequences."""
    return sum(one * other for one, other in zip(left, right, strict=True))


def measure_and_fit(
    measure: Callable[[], Measurements], gpu: Gpu, gpus_per_node: int
) -> tuple[Measurements, Gpu]:
    """Measure until the times can be fitted, and return them with the fitted GPU.

    Other programs on the nodes can make small messages slower than large ones. The links are then
    measured again, and the shorter time of each operation counts.

    Raises:
        FitFailed: the measured times still do not grow with the size of the messages.
    """
    measured = measure()
    for _ in range(MEASUREMENTS - 1):
        try:
            return measured, fitted_gpu(gpu, measured, gpus_per_node)
        except FitFailed:
            measured = measured.or_shorter(measure())
    return measured, fitted_gpu(gpu, measured, gpus_per_node)


def fitted_gpu(gpu: Gpu, measured: Measurements, gpus_per_node: int) -> Gpu:
    """Return a GPU whose plans reproduce the measurements; what was not measured stays.

    A rate above that of the datasheet raises the datasheet's rate, and its efficiency is then 1.

    Raises:
        FitFailed: the measured times do not grow with the size of the messages.
    """
    links = LinkFit(gpu, gpus_per_node).fit(measured.links)
    share = matmul_share(gpu, measured)
    if share > 1:
        peaks = {precision: rounded(peak * share) for precision, peak in gpu.peak_tflops.items()}
        gpu = replace(gpu, peak_tflops=peaks)
    gpu = replace(gpu, matmul_efficiency=min(1.0, share))
    if measured.inside_nodes:
        rate = max(links.node_rate, gpu.node_link_gigabytes_per_second)
        gpu = replace(
            gpu,
            node_link_gigabytes_per_second=rate,
            node_link_efficiency=links.node_rate / rate,
            node_link_latency_seconds=links.node_latency,
        )
    if measured.across_nodes:
        rate = max(links.network_rate, gpu.network_gigabytes_per_second)
        gpu = replace(
            gpu,
            network_gigabytes_per_second=rate,
            network_efficiency=links.network_rate / rate,
            network_latency_seconds=links.network_latency,
        )
    return gpu


def matmul_share(gpu: Gpu, measured: Measurements) -> float:
    """Return the matmul efficiency for which the planner predicts the median rate of the ranks."""
    size, kernels = measured.matmul_size, THREEFOLD.kernels_on(gpu)
    planned = matmul_seconds(kernels, measured.precision, rows=size, columns=size, inner=size)
    seconds = 2e-12 * size**3 / measured.median_tflops
    kernel = gpu.kernel_seconds
    return gpu.matmul_efficiency * (planned - kernel) / (seconds - kernel)


# The datasheet that `sweep.py links NAME` writes: check of the name, content, writing.

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,59}")
NODE_LINK_KEYS = ("node_link_efficiency", "node_link_latency_seconds")
NETWORK_KEYS = ("network_efficiency", "network_latency_seconds")


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a datasheet that `links` may write.

    Raises:
        UserError: the name is not valid, the file belongs to another datasheet, or the folder
            cannot be written.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"invalid name {name}: expected a letter and then at most 59 letters, digits, - or "
            f"_, for example my-cluster"
        )
    file = file_of(folder, name)
    if not is_own(file, name) or name.lower() in names_of_others(folder, file):
        raise UserError(
            f"links {name}: {file.name} is a datasheet that links {name} did not write; use "
            f"another name, for example links {free_name(folder, name)}"
        )
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written, and sweep.py links writes {file.name} there; make it "
            f"writable, for example with chmod u+w"
        )
    return file


def is_own(file: Path, name: str) -> bool:
    """Return True if a file does not exist, or if `links` has written it and git ignores it."""
    if not os.path.lexists(file):
        return True
    first_line = (
        file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if file.is_file()
        else ""
    )
    own_marks = (f"# {mark(name)}", f"# {MEASURED_MARK} --links {name}`")  # before it was a command
    return first_line in own_marks and not is_tracked(file)


def mark(name: str) -> str:
    """Return the first line of a datasheet that `links` has written."""
    return f"{MEASURED_MARK} links {name}`"


def is_tracked(file: Path) -> bool:
    """Return True if git tracks a file; False outside a git repository."""
    command = ["git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # git is not installed
        return False


def names_of_others(folder: Path, file: Path) -> set[str]:
    """Return the names that `links` must not use, in lower case.

    They are the names of the datasheets in all files but one, and the beginnings of these names,
    such as "a100", by which published tables name a GPU.
    """
    names = {read_gpu(path).name.lower() for path in folder.glob("*.toml") if path != file}
    return names | {name.split("-")[0] for name in names}


def free_name(folder: Path, name: str) -> str:
    """Return a name like the given one that no datasheet has."""
    names = itertools.chain([f"{name}-links"], (f"{name}-links-{n}" for n in itertools.count(2)))
    files = ((name, file_of(folder, name)) for name in names)
    return next(
        name
        for name, file in files
        if not os.path.lexists(file) and name.lower() not in names_of_others(folder, file)
    )


def content(
    fitted: Gpu, measured: Measurements, *, name: str, source: Gpu, nodes: int, today: date
) -> str:
    """Return the text of the datasheet.

    Args:
        measured: the measurements that the values were fitted to
        source: the GPU whose other values were kept
    """
    gpu = replace(
        fitted,
        name=name,
        device_names=device_names(source, measured.device),
        node_link_gigabytes_per_second=rounded(fitted.node_link_gigabytes_per_second),
        network_gigabytes_per_second=rounded(fitted.network_gigabytes_per_second),
    )
    ranks = len(measured.rates)
    comment = [
        mark(name),
        f"on {today}, by {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}: "
        f"{measured.device}, torch {measured.torch}.",
        f"Rates and latencies were fitted to {measured_text(measured)}.",
        *(() if measured.inside_nodes else ("Links within a node were not measured.",)),
        *(() if measured.across_nodes else ("The network between nodes was not measured.",)),
        f"Values that were not measured are those of {source.name}.",
    ]
    return datasheet_text(gpu, comment=comment, measured=measured_keys(measured))


def measured_keys(measured: Measurements) -> Sequence[str]:
    """Return the keys of [efficiency] that the measurements decide."""
    return (
        "matmul_efficiency",
        *(NODE_LINK_KEYS if measured.inside_nodes else ()),
        *(NETWORK_KEYS if measured.across_nodes else ()),
    )


def measured_text(measured: Measurements) -> str:
    """Describe the measurements that a datasheet was fitted to."""
    size = measured.matmul_size
    text = f"matmuls of {size} x {size} x {size} in {measured.precision}"
    if not measured.links:
        return text
    return f"{text}, transfers and all-reduces"


def device_names(source: Gpu, device: str) -> list[str]:
    """Return the driver's names of the measured device; empty for a CPU."""
    if not source.device_names or any(name in device for name in source.device_names):
        return source.device_names
    return [device]


def write(file: Path, text: str) -> None:
    """Write a datasheet completely or not at all.

    Raises:
        OSError: the file cannot be written; an earlier file is unchanged.
    """
    fresh = file.with_name(f"{file.name}.{os.getpid()}.incomplete")
    try:
        write_whole(file, text, fresh=fresh)
    finally:  # also if a signal has ended the command
        fresh.unlink(missing_ok=True)
