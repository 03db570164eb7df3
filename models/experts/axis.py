"""The expert axis: ranks that hold different experts of the same layers."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ExpertAxis:
    """The expert axis from the perspective of one rank.

    group: `layout.expert` x `layout.tensor` ranks of one stage, each with an equal share of the
        experts
    sequence_group: the ranks that hold tokens of the same sequences, over the context and the
        tensor axis; None: this rank has whole sequences
    sequence_size: number of ranks in `sequence_group`
    tensor_size: number of tensor ranks, which divide the tokens of a context rank among them
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    sequence_size: int = 1
    tensor_size: int = 1

    def experts_here(self, experts: int) -> range:
        """Return the numbers of this rank's experts, of `experts` in all."""
        share = experts // self.size
        return range(self.rank * share, (self.rank + 1) * share)
