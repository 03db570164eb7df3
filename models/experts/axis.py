"""The expert axis: ranks that hold different experts of the same layers."""

from dataclasses import dataclass, field

import torch.distributed as dist

from models.experts.overlap import Turns
from models.parallel.collectives import TensorAxis


@dataclass(frozen=True)
class ExpertAxis:
    """The expert axis from the perspective of one rank.

    group: ranks of one stage, each with an equal share of the experts: `layout.expert` x
        `layout.tensor` ranks, or with expert tensor parallelism `layout.expert` ranks
    sequence_group: the ranks that hold tokens of the same sequences, over the context and the
        tensor axis; None: this rank has whole sequences
    sequence_size: number of ranks in `sequence_group`
    tensor_size: number of tensor ranks, which divide the tokens of a context rank among them
    columns: the tensor ranks that divide the columns of this rank's experts (expert tensor
        parallelism); of size 1: each rank has whole experts
    turns: switches to the paired pass before this rank waits for an exchange
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    sequence_size: int = 1
    tensor_size: int = 1
    columns: TensorAxis = field(default_factory=TensorAxis)
    turns: Turns = field(default_factory=Turns, compare=False)

    def experts_here(self, experts: int) -> range:
        """Return the numbers of this rank's experts, of `experts` in all."""
        share = experts // self.size
        return range(self.rank * share, (self.rank + 1) * share)
