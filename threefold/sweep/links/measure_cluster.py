"""Measurement of a cluster by `sweep.py links`, and its report."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from models.errors import UserError
from threefold.config.sections import REPOSITORY
from threefold.gpus import datasheet
from threefold.gpus.datasheet import Gpu, load_gpu, read_gpu
from threefold.plan.job import DEFAULT_CLUSTER
from threefold.sweep.folder import SweepStopped
from threefold.sweep.links import fit
from threefold.sweep.links.fit import (
    MATMUL_SIZE,
    SIZES,
    FitFailed,
    LinkFit,
    Links,
    LinkTime,
    Measurements,
    measure_and_fit,
)
from threefold.sweep.ranks.controller import (
    WorkerLauncher,
    Workers,
    WorkersAbandoned,
    WorkersFailed,
    WorkersFolder,
    check_workers,
)
from threefold.sweep.trial import WorkerKind

WORKERS = REPOSITORY / "runs" / "links"  # of all commands; on a file system that all nodes share
SECONDS_TO_MEASURE = 600.0  # at most, all operations once
KEY = "links"  # in place of the key of a trial
VERBS = {"out_of_memory": "ran out of memory", "hung": "hung", "crashed": "crashed"}


@dataclass(frozen=True)
class ClusterMeasurement:
    """A measurement of a cluster.

    Attributes:
        name: name of the datasheet to write
        source: the GPU whose datasheet keeps the values that are not measured
    """

    name: str
    file: Path
    source: Gpu
    kind: WorkerKind
    seconds: float = SECONDS_TO_MEASURE

    @classmethod
    def of(
        cls,
        name: str,
        *,
        nodes: int | None,
        gpus_per_node: int | None,
        gpu: str | None,
        seconds: float | None,
    ) -> "ClusterMeasurement":
        """Return the measurement that the options describe; None stands for a default.

        Raises:
            UserError: an option is not valid.
        """
        source = load_gpu(gpu or str(DEFAULT_CLUSTER["gpu"]))
        kind = WorkerKind(
            nodes=nodes or int(DEFAULT_CLUSTER["nodes"]),
            gpus_per_node=gpus_per_node or int(DEFAULT_CLUSTER["gpus_per_node"]),
            gpu=source.name,
            deterministic=False,
            pipelined=False,
        )
        file = fit.own_file(datasheet.FOLDER, name)
        return cls(name, file, source, kind, seconds or SECONDS_TO_MEASURE)

    def run(self, launcher: WorkerLauncher) -> tuple[Measurements, Gpu]:
        """Measure, write the datasheet, and return both.

        Raises:
            UserError: a rank has rejected the measurement.
            SweepStopped: the ranks have failed, or the datasheet cannot be written.
        """
        check_workers(self.kind, launcher)
        measured, fitted = self._measure(launcher)
        text = fit.content(
            fitted, measured, name=self.name, source=self.source, nodes=self.kind.nodes,
            today=date.today(),
        )  # fmt: skip
        try:
            fit.write(self.file, text)
        except OSError as problem:
            raise SweepStopped(
                f"{self.file} cannot be written ({problem.strerror}); an earlier file is "
                f"unchanged. Free disk space, or make the folder writable, and rerun the command"
            ) from None
        return measured, read_gpu(self.file)

    def _measure(self, launcher: WorkerLauncher) -> tuple[Measurements, Gpu]:
        """Start the ranks, let them measure until the times can be fitted, and stop them."""
        with worlds_folder() as folder:
            try:
                workers = Workers.start(self.kind, (folder / "workers").resolve(), launcher)
            except WorkersFailed as problem:
                raise SweepStopped(f"the ranks cannot be started: {problem}") from None
            try:
                return measure_and_fit(
                    lambda: self._round(workers), self.source, self.kind.gpus_per_node
                )
            except FitFailed as problem:
                raise SweepStopped(
                    f"{problem}, so {self.file.name} was not written; rerun the command while the "
                    f"nodes are idle"
                ) from None
            except WorkersAbandoned:
                raise SweepStopped(
                    "the ranks have exited because this command was suspended; rerun it"
                ) from None
            finally:
                workers.stop()

    def _round(self, workers: Workers) -> Measurements:
        """Measure all operations once."""
        result = workers.run(self._request(), self.seconds)
        if result.outcome == "rejected":
            raise UserError(result.reason)
        if result.links is None:
            raise SweepStopped(
                f"the measurement {VERBS[result.outcome]}: {result.reason}; no datasheet was "
                f"written\n{result.log}".rstrip()
            )
        return result.links

    def _request(self) -> dict[str, Any]:
        """Return the request that the ranks read."""
        device = self.source.device
        links = {
            "gpu": self.source.name,
            "gpus_per_node": self.kind.gpus_per_node,
            "bytes": SIZES[device],
            "matmul_size": MATMUL_SIZE[device],
            "precision": next(iter(self.source.peak_tflops)),  # the GPU's usual one
        }
        return {"key": KEY, "links": links}


@contextmanager
def worlds_folder() -> Iterator[Path]:
    """Create a folder for workers, and remove it at the end.

    Raises:
        SweepStopped: the folder cannot be written.
    """
    folder = WorkersFolder(WORKERS)
    try:
        folder.create()
    except OSError as problem:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise SweepStopped(
            f"{folder.path} cannot be written ({problem.strerror}); make it writable, or free disk "
            f"space"
        ) from None
    folder.start_heartbeat()
    try:
        yield folder.path
    finally:
        folder.close()


# Text and JSON of `sweep.py links`: the measurements next to the planner's predictions.

SHOWN_LINKS = (
    ("within a node", "node_link_gigabytes_per_second", "node_link_efficiency",
     "node_link_latency_seconds"),
    ("between nodes", "network_gigabytes_per_second", "network_efficiency",
     "network_latency_seconds"),
)  # fmt: skip


def report_lines(measured: Measurements, gpu: Gpu, kind: WorkerKind, file: Path) -> Iterator[str]:
    """Yield the table of a measurement."""
    rank, slowest = measured.slowest
    yield (
        f"{kind.size} rank{'s' * (kind.size > 1)} on {kind.nodes} node{'s' * (kind.nodes > 1)}: "
        f"{measured.device}, torch {measured.torch}"
    )
    yield (
        f"matmul, {measured.precision}: median {measured.median_tflops:.4g} TFLOP/s; slowest "
        f"{slowest.tflops:.4g} TFLOP/s (rank {rank} on {slowest.host})"
    )
    if measured.links:
        yield f"{'':36}{'size':>10}{'seconds':>12}{'GB/s':>9}{'plan':>12}"
    for time, planned in with_plans(measured.links, gpu, kind):
        yield (
            f"{operation_text(time):36}{size_text(time.bytes):>10}{time.seconds:12.6f}"
            f"{time.bus_gigabytes_per_second:9.3g}{planned:12.6f}"
        )
    for (place, rate, efficiency, latency), times in zip(
        SHOWN_LINKS, (measured.inside_nodes, measured.across_nodes), strict=True
    ):
        values = (
            f"{getattr(gpu, rate):.3g} GB/s x {getattr(gpu, efficiency):.3g}, latency "
            f"{getattr(gpu, latency) * 1e6:.3g} microseconds"
        )
        yield f"links {place}: {values}" + ("" if times else " (not measured)")
    yield f"wrote {file.relative_to(REPOSITORY) if file.is_relative_to(REPOSITORY) else file}"
    yield f'To use it: [cluster] gpu = "{gpu.name}" in a recipe, or plan.py --gpu {gpu.name}'


def report_table(measured: Measurements, gpu: Gpu, kind: WorkerKind, file: Path) -> dict[str, Any]:
    """Return the table for --json."""
    rank, slowest = measured.slowest
    values = {key: value for key, value in vars(gpu).items() if "link" in key or "network" in key}
    return {
        "name": gpu.name,
        "file": str(file),
        "device": measured.device,
        "torch": measured.torch,
        "nodes": kind.nodes,
        "gpus_per_node": kind.gpus_per_node,
        "matmul": {
            "precision": measured.precision,
            "size": measured.matmul_size,
            "median_tflops": measured.median_tflops,
            "slowest": {"rank": rank, "host": slowest.host, "tflops": slowest.tflops},
            "tflops_of_ranks": [rate.tflops for rate in measured.rates],
        },
        "links": [
            vars(time)
            | {
                "bus_gigabytes_per_second": time.bus_gigabytes_per_second,
                "planned_seconds": planned,
            }
            for time, planned in with_plans(measured.links, gpu, kind)
        ],
        "datasheet": values | {"matmul_efficiency": gpu.matmul_efficiency},
    }


def with_plans(
    times: Sequence[LinkTime], gpu: Gpu, kind: WorkerKind
) -> Iterator[tuple[LinkTime, float]]:
    """Yield each time with the planner's seconds for the written datasheet."""
    fit, links = LinkFit(gpu, kind.gpus_per_node), Links.of(gpu)
    for time in times:
        yield time, fit.predict(links, time)


def operation_text(time: LinkTime) -> str:
    """Describe an operation, such as "all-reduce of 8 ranks of a node"."""
    if time.operation == "transfer":
        return f"transfer {'between two nodes' if time.across_nodes else 'within a node'}"
    place = "on all nodes" if time.across_nodes else "of a node"
    return f"all-reduce, {time.ranks} ranks {place}"


def size_text(size: int) -> str:
    """Format a size in KiB or MiB."""
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
