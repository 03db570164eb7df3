"""Activations and gradients between the stages of a pipeline; nobody waits while they travel.

NCCL knows no tags and runs what two ranks exchange over one communicator in one order, so each
direction has communicators of its own for activations and for gradients. What goes over one of
them arrives in the order in which it is wanted; the orders of `order.py` see to that.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from torch import Tensor

from models.parallel.collectives import TensorAxis, all_gather
from models.pipeline.order import FORWARD, Pass, Pipeline


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


def wait_for(work: dist.Work) -> None:
    """Wait for what was begun; `recipes/training/hang.py` knows a waiting rank by this function."""
    work.wait()


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
        self.places = {work: place for order in pipeline.orders for place, work in enumerate(order)}

    def _groups(self, grid: PipelineParallelGrid) -> dict[tuple[bool, bool], dist.ProcessGroup]:
        """(activations, to a later rank) to the group that carries them; made by all ranks."""
        kinds = [(forward, later) for forward in (True, False) for later in (True, False)]
        if dist.get_backend() != "nccl":  # others go by the tag
            return dict.fromkeys(kinds, grid.get_pipe_parallel_group())
        groups = {}
        for ranks in grid.pipe_groups:
            made = {kind: dist.new_group(ranks) for kind in kinds}
            if ranks == self.ranks:
                groups = made
        return groups

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
            group=self._group(work, sender, work.stage),
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
            group=self._group(work, work.stage, receiver.stage),
            tag=self._tag(receiver),
        )
        self._let_go(None)
        self.leaving.append((receiver, part, sending))

    def finish(self) -> None:
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
        left = []
        for receiver, part, sending in self.leaving:
            same_stage = heard is not None and receiver.stage == heard.stage
            if same_stage and self.places[receiver] <= self.places[heard]:
                sending.wait()
            elif not sending.is_completed():
                left.append((receiver, part, sending))
        self.leaving = left

    def _group(self, work: Pass, sender: int, receiver: int) -> dist.ProcessGroup:
        return self.groups[work.kind == FORWARD, receiver > sender]

    def _tag(self, receiver: Pass) -> int:
        place = self.pipeline.position(receiver.stage, receiver.chunk)
        number = place * self.pipeline.micro_batches + receiver.micro_batch
        return 2 * number + (receiver.kind == FORWARD)
