"""Activations and gradients between the stages of a pipeline, transferred in the background.

NCCL has no tags and runs the operations of a communicator in the order in which they were posted,
so each ordered pair of stages has a communicator of its own, and sender and receiver post in the
same order (`program` in `schedules.py`). NCCL also connects two ranks inside their first exchange,
and each host blocks until the other one joins. All routes are therefore connected before the first
step.
"""

import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor

from models.parallel.collectives import (
    NcclSettings,
    TensorAxis,
    all_gather,
    create_groups,
    matches_by_order,
    wait_for,
)
from threefold.pipeline.schedules import FORWARD, Pass, Pipeline, Route, rounds, routes

# Thread blocks that a transfer occupies on the GPU while the passes compute. NCCL would take 16 to
# 32 inside a node. With four, 16 MiB are sent in a fraction of the time of the pass that computed
# them.
TRANSFER_SETTINGS = NcclSettings(max_ctas=4)


@dataclass(frozen=True)
class Boundary:
    """The tensors that pass from one chunk to the next.

    shape, dtype: shape and type of the activations, and of their gradients
    tensor: ranks that hold the same activations and send one part each, unless the activations are
        split along the sequence already
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: TensorAxis

    @property
    def is_parted(self) -> bool:
        """True if each tensor rank sends one part, gathered on arrival (scatter/gather).

        Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
        """
        divides = math.prod(self.shape) % self.tensor.size == 0
        return self.tensor.size > 1 and not self.tensor.sequence_parallel and divides


class Channels:
    """The messages of one stage, received and sent asynchronously."""

    def __init__(
        self,
        pipeline: Pipeline,
        grid: PipelineParallelGrid,
        boundary: Boundary,
        device: torch.device,
    ):
        self.pipeline, self.boundary, self.device = pipeline, boundary, device
        self.stage = grid.get_stage_id()
        self.ranks = grid.pp_group  # global ranks of the stages
        self.groups = self._groups(grid)
        self.expected: dict[Pass, tuple[Tensor, dist.Work]] = {}
        self.leaving: list[
            tuple[Pass, Tensor, dist.Work]
        ] = []  # each with the pass that receives it
        self.set_pipeline(pipeline)

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Change the number of micro-batches of a step; everything else stays the same."""
        self.pipeline = pipeline
        self.turns = {work: turn for order in pipeline.orders for turn, work in enumerate(order)}

    def _groups(self, grid: PipelineParallelGrid) -> dict[Route, dist.ProcessGroup]:
        """Create the process groups of this stage's routes, two ranks each; collective."""
        if not matches_by_order():
            return dict.fromkeys(routes(self.pipeline), grid.get_pipe_parallel_group())
        topology = grid.topology()
        ranks = [topology.filter_match(pipe=stage) for stage in range(self.pipeline.stages)]
        groups: dict[Route, dist.ProcessGroup] = {}
        for each in rounds(self.pipeline):
            pairs = [pair for a, b in each for pair in zip(ranks[a], ranks[b], strict=True)]
            group = create_groups(pairs, TRANSFER_SETTINGS)
            if group is not None:
                groups |= {route: group for route in each if self.stage in route}
        return groups

    def connect(self) -> None:
        """Exchange one number over every route, in the same order on all ranks; collective.

        The first send or receive between two ranks of an NCCL communicator blocks the host until
        the peer posts its own (ncclTransportP2pSetup). In a step, receives are posted before the
        peer has anything to send, so that two stages would block each other forever.
        """
        token = torch.zeros(1, device=self.device)
        for route in routes(self.pipeline):
            sender, receiver = route
            if self.stage == sender:
                dist.send(token, self.ranks[receiver], group=self.groups[route])
            elif self.stage == receiver:
                dist.recv(token, self.ranks[sender], group=self.groups[route])

    def expect(self, work: Pass) -> None:
        """Start to receive the input of a pass of this stage."""
        source = self.pipeline.needed(work)
        assert source is not None
        sender = source.stage
        buffer = self._buffer()
        receiving = dist.irecv(
            buffer,
            src=self.ranks[sender],
            group=self.groups[sender, work.stage],
            tag=self._tag(work),
        )
        assert receiving is not None  # None is for ranks outside the group
        self.expected[work] = buffer, receiving

    def receive(self, work: Pass) -> Tensor:
        """Wait for the input of a pass, whose receive was posted, and return it."""
        buffer, receiving = self.expected.pop(work)
        wait_for(receiving)
        self._let_go(self.pipeline.needed(work))
        return self._whole(buffer)

    def zero_message(self) -> Tensor:
        """Return a message of zeros as if it had been received; collective over the tensor axis."""
        return self._whole(self._buffer().zero_())

    def part_to_send(self, result: Tensor) -> Tensor:
        """Return the part of a pass's result that this rank sends, flat."""
        part = result.detach().contiguous().view(-1)
        if self.boundary.is_parted:
            part = part.chunk(self.boundary.tensor.size)[self.boundary.tensor.rank]
        return part

    def _buffer(self) -> Tensor:
        size = torch.Size(self.boundary.shape).numel()
        if self.boundary.is_parted:
            size //= self.boundary.tensor.size
        return torch.empty(size, dtype=self.boundary.dtype, device=self.device)

    def _whole(self, buffer: Tensor) -> Tensor:
        """Return the whole message; each tensor rank's buffer may hold only a part of it."""
        if self.boundary.is_parted:
            buffer = all_gather(buffer, self.boundary.tensor)
        return buffer.view(self.boundary.shape)

    def send(self, work: Pass, result: Tensor) -> None:
        """Start to send the result of a pass to the stage that continues with it."""
        receiver = self.pipeline.receiver(work)
        assert receiver is not None
        part = self.part_to_send(result)
        sending = dist.isend(
            part,
            dst=self.ranks[receiver.stage],
            group=self.groups[work.stage, receiver.stage],
            tag=self._tag(receiver),
        )
        assert sending is not None  # None is for ranks outside the group
        if self.device.type == "cpu":
            os.sched_yield()  # gloo's thread may share the core of this thread
        self._let_go(None)
        self.leaving.append((receiver, part, sending))

    def wait_for_sends(self) -> None:
        """Wait until all sends are complete."""
        assert not self.expected
        for _, _, sending in self.leaving:
            wait_for(sending)
        self.leaving = []

    def _let_go(self, heard: Pass | None) -> None:
        """Free the tensors of completed sends.

        NCCL reports completion. gloo reports it only for sends that were waited for; a message
        shows that its sender has received all that the message depends on.

        Args:
            heard: the pass whose result has arrived, if one has
        """
        still_leaving = []
        for receiver, part, sending in self.leaving:
            is_received = (
                heard is not None
                and receiver.stage == heard.stage
                and self.turns[receiver] <= self.turns[heard]
            )
            if is_received:
                sending.wait()
            elif not sending.is_completed():
                still_leaving.append((receiver, part, sending))
        self.leaving = still_leaving

    def _tag(self, receiver: Pass) -> int:
        virtual_stage = self.pipeline.virtual_stage(receiver.stage, receiver.chunk)
        number = virtual_stage * self.pipeline.micro_batches + receiver.micro_batch
        return 2 * number + (receiver.kind == FORWARD)
