"""The planner's numbers for the measures of a preflight."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from models.errors import UserError
from threefold.config.parallel_dims import Topology
from threefold.config.recipe import Recipe
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import GIB, stage_memory
from threefold.plan.time.block import all_reduce_seconds, matmul_seconds, transfer_seconds
from threefold.pretrain.preflight.measures import (
    DATA,
    MATMUL,
    NETWORK,
    NODE_LINK,
    PIPELINE,
    TENSOR,
    LinkReport,
)


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
    topology: Topology,
    machine: Machine | None,
    *,
    precision: str,
    matmul_size: int,
    links: LinkReport,
) -> Planned:
    """Return the planner's numbers.

    Args:
        recipe: the recipe of the run
        topology: the layout of the ranks
        machine: the GPUs of the run; None if they have no datasheet
        precision: precision of the matmuls
        matmul_size: rows, columns and inner dimension of the measured matmul
        links: the links of a rank, for the sizes of the messages
    """
    if machine is None or machine.gpu.device == "cpu":  # CPUs differ too much
        return Planned()
    rates = {
        measure: _link_rate(measure, machine, topology, size)
        for measure, size in links.bytes.items()
    }
    if precision in machine.gpu.peak_tflops:
        size = matmul_size
        seconds = matmul_seconds(machine.gpu, precision, rows=size, columns=size, inner=size)
        rates[MATMUL] = 2e-12 * size**3 / seconds
    try:
        stages = stage_memory(job_of(recipe, machine))
    except UserError:  # the planner rejects what the engine accepts
        return Planned(rates)
    context = machine.gpu.context_gib
    return Planned(rates, tuple(stage.total / GIB - context for stage in stages))


def _link_rate(measure: str, machine: Machine, topology: Topology, size: int) -> float:
    """Return the rate of messages of `size` bytes in GB/s, as in `LinkReport`."""
    strides = {NODE_LINK: 1, NETWORK: machine.gpus_per_node, PIPELINE: machine.gpus_per_node}
    if measure in strides:
        return 1e-9 * size / transfer_seconds(machine, size, stride=strides[measure])
    ranks, stride = {
        TENSOR: (topology.tensor, 1),
        DATA: (topology.replicas, topology.tensor),
    }[measure]
    seconds = all_reduce_seconds(machine, size, ranks=ranks, stride=stride)
    return 1e-9 * size * 2 * (ranks - 1) / ranks / seconds
