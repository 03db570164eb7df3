"""The context axis: ranks that share their samples and divide each sequence."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ContextAxis:
    """The context axis from the perspective of one rank.

    group: the ranks that hold the other tokens of the same sequences
    attention: algorithm of attention: "gather", "ring" or "ulysses"
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    attention: str = "gather"
