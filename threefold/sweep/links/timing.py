"""Measurement of a cluster by the workers of a sweep: their matmuls and the links between them."""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from models.errors import UserError
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.build import DTYPES
from threefold.gpus.datasheet import check_device, processor_name
from threefold.runtime.cpu_matmuls import replace_slow_cpu_matmuls
from threefold.runtime.processes import check_machine, gathered, on_gpu
from threefold.runtime.timing import (
    Repetitions,
    matmul_tflops,
    time_all_reduce,
    time_transfer,
)
from threefold.sweep.links.fit import (
    OPERATIONS,
    LinkTime,
    Measurements,
    Operation,
    RankRate,
)
from threefold.sweep.trial import Result

MAX_CALLS = 20  # of one repetition
BYTES_PER_REPETITION = {"cpu": 2**26, "cuda": 2**30}


def measure_links(
    request: dict[str, Any], world: LaunchEnvironment, control: dist.ProcessGroup
) -> Result:
    """Measure the device and the links of this world; collective.

    Args:
        request: name of the device, GPUs per node, bytes of the messages, precision and
            size of the matmul
        control: group of all ranks on the CPU

    Raises:
        UserError: the ranks run on another kind of device, or on other nodes than expected.
    """
    check_machine(world, precision=request["precision"], compile=False, gpu=request["gpu"])
    device = torch.device(get_accelerator().current_device_name())
    check_device(request["gpu"], device.type)
    if device.type == "cpu" and request["precision"] != "fp32":  # as in training
        replace_slow_cpu_matmuls()
    size = request["matmul_size"]
    rate = matmul_tflops(size, DTYPES[request["precision"]], device)
    rates = gathered(RankRate.here(rate), control)
    check_hosts([rate.host for rate in rates], request["gpus_per_node"])
    links = LinkTimer(world, control, device, request["gpus_per_node"])
    measured = Measurements(
        device=torch.cuda.get_device_name(device) if on_gpu() else processor_name(),
        torch=torch.__version__.partition("+")[0],
        precision=request["precision"],
        matmul_size=size,
        rates=rates,
        links=links.measure(request["bytes"]),
    )
    return Result(outcome="ok", links=measured)


def check_hosts(hosts: list[str], gpus_per_node: int) -> None:
    """Check that the launcher has placed consecutive ranks on the same node.

    Raises:
        UserError: the ranks of a node are on several hosts.
    """
    for first in range(0, len(hosts), gpus_per_node):
        of_node = hosts[first : first + gpus_per_node]
        if len(set(of_node)) > 1:
            raise UserError(
                f"ranks {first} to {first + gpus_per_node - 1} run on {', '.join(set(of_node))}, "
                f"and --gpus-per-node {gpus_per_node} places them on one node; use the number of "
                f"ranks on each node"
            )


class LinkScope(NamedTuple):
    """The ranks between which links are measured.

    Attributes:
        across_nodes: True if the ranks are on several nodes
        pair: the ranks of a transfer; in the scope of a node, each node has its own pair
        group: group of an all-reduce; None: all ranks
    """

    across_nodes: bool
    ranks: int
    pair: tuple[int, int]
    group: dist.ProcessGroup | None


class LinkTimer:
    """Times transfers and all-reduces inside each node and across all nodes.

    Args:
        gpus_per_node: number of consecutive ranks on each node
    """

    def __init__(
        self,
        world: LaunchEnvironment,
        control: dist.ProcessGroup,
        device: torch.device,
        gpus_per_node: int,
    ):
        self.world, self.control, self.device = world, control, device
        self.gpus_per_node = gpus_per_node
        # Groups are created once: NCCL would otherwise connect the ranks again for each size.
        self.node: dist.ProcessGroup | None = None
        if 1 < gpus_per_node < world.size:
            self.node, _ = dist.new_subgroups(group_size=gpus_per_node)

    def measure(self, sizes: list[int]) -> list[LinkTime]:
        """Return the times of all operations, from inside a node to across all nodes; collective.

        All nodes measure their own links at the same time, and the median of their times counts.
        Across nodes, the first rank of the first node and of the second node exchange messages.

        Args:
            sizes: bytes of the messages
        """
        return [
            self._time(operation, size, scope)
            for scope in self._scopes()
            for operation in OPERATIONS
            for size in sizes
        ]

    def _scopes(self) -> list[LinkScope]:
        """Return the scopes that this world has."""
        size, per_node = self.world.size, self.gpus_per_node
        first_of_node = self.world.rank // per_node * per_node
        scopes = []
        if per_node > 1:
            pair = (first_of_node, first_of_node + 1)
            scopes.append(LinkScope(across_nodes=False, ranks=per_node, pair=pair, group=self.node))
        if size > per_node:
            scopes.append(LinkScope(across_nodes=True, ranks=size, pair=(0, per_node), group=None))
        return scopes

    def _time(self, operation: Operation, size: int, scope: LinkScope) -> LinkTime:
        """Time an operation with messages of `size` bytes; collective."""
        is_transfer = operation == "transfer"
        seconds_of: Callable[..., float] | None = None  # on ranks that take no part
        if not is_transfer:
            seconds_of = partial(time_all_reduce, group=scope.group)
        elif self.world.rank in scope.pair:
            seconds_of = partial(time_transfer, pair=scope.pair, rank=self.world.rank)
        calls = max(1, min(MAX_CALLS, BYTES_PER_REPETITION[self.device.type] // size))
        dist.barrier(group=self.control)
        repetitions = Repetitions(calls=calls)
        seconds = seconds_of(size, self.device, repetitions) if seconds_of else None
        measured = [of_rank for of_rank in gathered(seconds, self.control) if of_rank is not None]
        return LinkTime(
            operation=operation,
            across_nodes=scope.across_nodes,
            ranks=2 if is_transfer else scope.ranks,
            bytes=size,
            seconds=median(measured),
        )
