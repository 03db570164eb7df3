"""Activations and gradients between the stages of a pipeline; nobody waits while they travel.

NCCL knows no tags, and torch runs what a rank sends and receives over one communicator one after
the other: a receive that is posted ahead would hold up a send. So each pair of stages has one of
its own for each direction, for activations and for gradients. What goes over it arrives in the
order in which it is wanted; the orders of `order.py` see to that.
"""

import os
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor

from models.parallel.collectives import TensorAxis, all_gather, wait_for
from models.pipeline.order import BACKWARD, FORWARD, Kind, Pass, Pipeline


@dataclass(frozen=True)
class Boundary:
    """What goes from one chunk to the next.

    shape, dtype: of the activations, and of their gradients
    axis: its ranks hold the same and send a part each, unless activations are split already
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: TensorAxis

    @property
    def is_parted(self) -> bool:
        """Whether tensor ranks send a part each, which arrives and is gathered (scatter/gather).

        Narayanan et al. 2021 (arXiv 2104.04473), section 4.1.
        """
        return self.axis.size > 1 and not self.axis.sequence_parallel


Route = tuple[Kind, int, int]  # what goes from which stage to which


def routes(pipeline: Pipeline) -> list[Route]:
    """All that stages send each other; the same list on every rank."""
    stages = [pipeline.place(position)[0] for position in range(pipeline.positions)]
    pairs = sorted({(a, b) for a, b in pairwise(stages) if a != b})
    return [(FORWARD, a, b) for a, b in pairs] + [(BACKWARD, b, a) for a, b in pairs]


class Channels:
    """What a stage receives and sends, asynchronously."""

    def __init__(
        self,
        pipeline: Pipeline,
        grid: PipelineParallelGrid,
        boundary: Boundary,
        device: torch.device,
    ):
        self.pipeline, self.boundary, self.device = pipeline, boundary, device
        self.ranks = grid.pp_group  # of the stages
        self.groups = self._groups(grid)
        self.expected: dict[Pass, tuple[Tensor, dist.Work]] = {}
        self.leaving: list[tuple[Pass, Tensor, dist.Work]] = []  # by the pass that waits for it
        self.turns = {work: turn for order in pipeline.orders for turn, work in enumerate(order)}

    def _groups(self, grid: PipelineParallelGrid) -> dict[Route, dist.ProcessGroup]:
        """The group of each route, of all ranks of its two stages; every rank makes all of them."""
        all_routes = routes(self.pipeline)
        if dist.get_backend() != "nccl":  # others go by the tag
            return dict.fromkeys(all_routes, grid.get_pipe_parallel_group())
        ranks = [grid.topology().filter_match(pipe=stage) for stage in range(self.pipeline.stages)]
        return {
            (kind, sender, receiver): dist.new_group(sorted(ranks[sender] + ranks[receiver]))
            for kind, sender, receiver in all_routes
        }

    def expect(self, work: Pass) -> None:
        """Start to receive what a pass of this stage starts with."""
        sender = self.pipeline.needed(work).stage
        size = torch.Size(self.boundary.shape).numel()
        if self.boundary.is_parted:
            size //= self.boundary.axis.size
        buffer = torch.empty(size, dtype=self.boundary.dtype, device=self.device)
        receiving = dist.irecv(
            buffer,
            src=self.ranks[sender],
            group=self.groups[work.kind, sender, work.stage],
            tag=self._tag(work),
        )
        self.expected[work] = buffer, receiving

    def receive(self, work: Pass) -> Tensor:
        """What a pass starts with, which was expected."""
        buffer, receiving = self.expected.pop(work)
        wait_for(receiving)
        self._let_go(self.pipeline.needed(work))
        if self.boundary.is_parted:
            buffer = all_gather(buffer, self.boundary.axis)
        return buffer.view(self.boundary.shape)

    def send(self, work: Pass, result: Tensor) -> None:
        """Start to send what a pass has made to the stage that goes on with it."""
        receiver = self.pipeline.receiver(work)
        part = result.detach().contiguous().view(-1)
        if self.boundary.is_parted:
            part = part.chunk(self.boundary.axis.size)[self.boundary.axis.rank]
        sending = dist.isend(
            part,
            dst=self.ranks[receiver.stage],
            group=self.groups[work.kind, work.stage, receiver.stage],
            tag=self._tag(receiver),
        )
        if self.device.type == "cpu":
            os.sched_yield()  # to gloo's thread, which may share this one's core
        self._let_go(None)
        self.leaving.append((receiver, part, sending))

    def wait_for_sends(self) -> None:
        """Wait until all has left."""
        assert not self.expected
        for _, _, sending in self.leaving:
            wait_for(sending)
        self.leaving = []

    def _let_go(self, heard: Pass | None) -> None:
        """Free what has arrived: NCCL says so, and a stage has all that it needed for what it sent.

        gloo calls nothing complete that was not waited for.

        heard: the pass whose result has come, if one has
        """
        still_leaving = []
        for receiver, part, sending in self.leaving:
            same_stage = heard is not None and receiver.stage == heard.stage
            if same_stage and self.turns[receiver] <= self.turns[heard]:
                sending.wait()
            elif not sending.is_completed():
                still_leaving.append((receiver, part, sending))
        self.leaving = still_leaving

    def _tag(self, receiver: Pass) -> int:
        position = self.pipeline.position(receiver.stage, receiver.chunk)
        number = position * self.pipeline.micro_batches + receiver.micro_batch
        return 2 * number + (receiver.kind == FORWARD)
