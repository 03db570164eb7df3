"""QK-clip: rescale queries and keys of heads whose attention logits exceed a limit.

Kimi K2 (Kimi Team 2025, arXiv 2507.20534, section 2.1 and algorithm 1). Muon lets the logits of a
few heads grow without bound. After an update, the weights of each head whose largest logit S of the
step exceeds `optimizer.qk_clip` = t are rescaled so that the same tokens would have logits t / S
times as large. The rescaling has no state: the next step begins without a maximum.
"""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.attention import AttentionCore
from models.config import ModelConfig
from models.kernels.attention_parts import LargestLogits
from models.parallel.collectives import TensorAxis
from models.sharding import sharding_of
from models.transformer import Block
from threefold.checkpoint.state import TrainingState


class QueryKeyClip:
    """Finds the largest logit of each head in a step, and rescales the heads above the limit.

    L layers with attention, prediction modules last; a heads.

    Args:
        module: this rank's part of the model; its attention begins to note logits
        limit: `optimizer.qk_clip`
        tensor: the tensor axis, which divides the heads
    """

    def __init__(self, module: nn.Module, model: ModelConfig, *, limit: float, tensor: TensorAxis):
        self.limit, self.tensor = limit, tensor
        self.shape = model.layers + model.prediction_depth, model.heads
        self.layers: dict[int, AttentionCore] = {
            block.number: block.attention for block in module.modules() if isinstance(block, Block)
        }
        self._largest: Tensor | None = None  # of this step
        for layer in self.layers.values():
            layer.largest_logits = LargestLogits(layer.heads)

    def reset(self) -> None:
        """Forget the logits, before a step."""
        self._largest = None
        for layer in self.layers.values():
            assert layer.largest_logits is not None
            layer.largest_logits.reset()

    def largest(self, device: torch.device) -> Tensor:
        """Return the largest logit of each head in the global batch, fp32 [L, a], on the host.

        The first call of a step is collective: an all-reduce over all ranks, of which each knows
        the maxima of its stage's layers, its heads and its tokens.
        """
        if self._largest is None:
            largest = torch.full(self.shape, float("-inf"), device=device)
            for number, layer in self.layers.items():
                assert layer.largest_logits is not None
                if layer.largest_logits.values is not None:
                    largest[number, self._heads(layer)] = layer.largest_logits.values
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            self._largest = largest.cpu()
        return self._largest

    def _heads(self, layer: AttentionCore) -> slice:
        return slice(self.tensor.rank * layer.heads, (self.tensor.rank + 1) * layer.heads)

    @torch.no_grad()
    def rescale(self, optimizer: torch.optim.Optimizer, state: TrainingState) -> None:
        """Rescale the fp32 weights that an optimizer step has just updated.

        DeepSpeed calls the optimizer with some groups at a time, or with all of them. Each flat is
        in one of these calls, so that it is rescaled once. Afterwards DeepSpeed copies the weights
        into the model and to the other data ranks.
        """
        flats = state.weights
        factors = self._factors(flats[0].device)
        if not factors:
            return
        updated = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        for fragment in state.fragments:
            parameter, flat = state.parameters[fragment.name], flats[fragment.flat]
            rows = factors.get(id(parameter))
            if rows is None or id(flat) not in updated:
                continue
            columns = prod(sharding_of(parameter).shape[1:])
            first, last = fragment.elements.start // columns, -(-fragment.elements.stop // columns)
            start = fragment.elements.start - first * columns
            own = rows[first:last].repeat_interleave(columns)[start:][: len(fragment.elements)]
            flat[fragment.offset :][: len(own)] *= own

    def _factors(self, device: torch.device) -> dict[int, Tensor]:
        """Return the factors of the rows of the parameters to rescale, by `id`; collective."""
        largest = self.largest(device)
        factors: dict[int, Tensor] = {}
        for number, layer in self.layers.items():
            logits = largest[number, self._heads(layer)]
            exceeds = logits > self.limit
            if exceeds.any():
                of_heads = torch.where(exceeds, self.limit / logits, 1.0)
                for parameter, rows in layer.rescaled_rows(of_heads):
                    factors[id(parameter)] = rows.to(device)
        return factors
