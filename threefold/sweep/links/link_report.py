"""Text and JSON of `sweep.py --links`: the measurements next to the planner's predictions."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from threefold.config.sections import REPOSITORY
from threefold.gpus.datasheet import Gpu
from threefold.sweep.links.fit import LinkFit, Links
from threefold.sweep.links.measurements import LinkTime, Measurements
from threefold.sweep.trial import WorldKind

SHOWN_LINKS = (
    ("within a node", "node_link_gigabytes_per_second", "node_link_efficiency",
     "node_link_latency_seconds"),
    ("between nodes", "network_gigabytes_per_second", "network_efficiency",
     "network_latency_seconds"),
)  # fmt: skip


def report_lines(measured: Measurements, gpu: Gpu, kind: WorldKind, file: Path) -> Iterator[str]:
    """Yield the table of a preflight.

    Args:
        measured: the measurements
        gpu: the written datasheet
        kind: the measured ranks
        file: path of the datasheet
    """
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


def report_table(measured: Measurements, gpu: Gpu, kind: WorldKind, file: Path) -> dict[str, Any]:
    """Return the table for --json; the arguments are those of `report_lines`."""
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
    times: Sequence[LinkTime], gpu: Gpu, kind: WorldKind
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
