"""Initial values of all parameters, the same in every layout.

| parameter                                    | initial value                                |
|----------------------------------------------|----------------------------------------------|
| norm weights                                 | 1                                            |
| biases                                       | 0                                            |
| weights that write into the residual stream  | normal, initial_std / sqrt(2 layers) (GPT-2) |
| all other weights, embeddings included       | normal, initial_std                          |
"""

import hashlib
import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.sharding import Sharding, sharding_of

# attention.output.weight, mlp.down.weight, mlp.shared.down.weight, mlp.experts.down_5
RESIDUAL_WEIGHTS = re.compile(r"\.(attention\.output\.weight|down\.weight|down_\d+)$")


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    *,
    seed: int,
    tensor_rank: int,
    tensor_size: int,
) -> None:
    """Fill this rank's parts of the parameters, given as (logical name, parameter)."""
    for name, parameter in parameters:
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            residual = RESIDUAL_WEIGHTS.search(name)
            std = config.initial_std / (math.sqrt(2 * config.layers) if residual else 1)
            sharding = sharding_of(parameter)
            logical = std * draw_normal(sharding, name=name, seed=seed)
            parameter.copy_(sharding.local_part(logical, tensor_rank, tensor_size))


def draw_normal(sharding: Sharding, *, name: str, seed: int) -> Tensor:
    """Return standard normal numbers of the logical shape, a function of seed and name alone.

    They are drawn on the CPU in fp32, so that neither device nor precision changes them.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randn(sharding.shape, generator=generator)
