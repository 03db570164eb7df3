"""Initial values of all parameters, the same in every layout, and the factors of muP.

A rank draws only the chunks of rows that contain elements of its part; a chunk has about 4 MB. All
cores of the rank draw chunks at the same time, which does not change their values.

| parameter                                    | initial value                                |
|----------------------------------------------|----------------------------------------------|
| norm weights                                 | 1                                            |
| biases                                       | 0                                            |
| weights that write into the residual stream  | normal, initial_std / sqrt(2 layers) (GPT-2) |
| attention sinks                              | normal, initial_std (GPT-OSS)                |
| all other weights, embeddings included       | normal, initial_std                          |

The parametrizations "mup" and "completep" change the standard deviations of matrices in the layers,
but not the normal numbers that are multiplied by them; a table of the factors is below.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.parallel.collectives import TensorAxis
from models.sharding import Place, place_of, sharding_of

# Factors by which a parametrization changes initial scale, update and forward pass.
#
# With these factors, the best learning rate of a base model is also the best one at other widths,
# and with "completep" at other depths. At the sizes of the base model, all factors are 1.
#
# m_N is the width ratio hidden_size / base_hidden_size, m_L the depth ratio layers / base_layers
# (1 unless the parametrization is "completep"), d the head size, d_base that of the base model.
#
# | parameter or tensor           | factor                                     | value            |
# |-------------------------------|--------------------------------------------|------------------|
# | hidden matrices               | initial standard deviation                 | m_N^-1/2         |
# |                               | learning rate, AdamW (weight decay inverse)| m_N^-1           |
# |                               | learning rate, Muon (weight decay inverse) | m_N^-1/2         |
# | router                        | initial standard deviation                 | m_N^-1           |
# |                               | learning rate (weight decay inverse)       | m_N^-1           |
# |                               | AdamW's epsilon                            | m_L^-1           |
# | all of a layer except routers | AdamW's epsilon                            | m_N^-1 m_L^-1    |
# | embeddings, final norm, head  | AdamW's epsilon                            | m_N^-1           |
# | outputs of attention and MLP  | residual multiplier                        | m_L^-1           |
# | logits                        | output multiplier                          | m_N^-1           |
# | attention scores              | scale, instead of d^-1/2                   | d_base^1/2 d^-1  |
#
# Width: Tensor Programs V (arXiv 2203.03466, table 8), in the form in which input and output
# matrices may be tied: these matrices keep their initial scale and learning rate, and the logits
# have a multiplier. Depth and epsilon: CompleteP (arXiv 2505.01618, table 1 with alpha = 1).

Algorithm = Literal["adamw", "muon"]


def width_ratio(model: ModelConfig) -> float:
    """Return m_N, the hidden size relative to that of the base model."""
    return model.hidden_size / (model.base_hidden_size or model.hidden_size)


def depth_ratio(model: ModelConfig) -> float:
    """Return m_L, the number of layers relative to that of the base model."""
    return model.layers / (model.base_layers or model.layers)


def initial_std(model: ModelConfig, place: Place) -> float:
    """Return the standard deviation of the initial values of a matrix.

    Matrices that write into the residual stream have the standard deviation of GPT-2,
    initial_std / sqrt(2 layers). With "completep", `layers` is the depth of the base model, because
    the residual multiplier accounts for the depth of this model.
    """
    layers = model.base_layers or model.layers
    std = model.initial_std / (math.sqrt(2 * layers) if place.writes_residual else 1)
    if place.role == "hidden":
        return std / math.sqrt(width_ratio(model))
    return std / width_ratio(model) if place.is_router else std


def learning_rate_factor(model: ModelConfig, place: Place, algorithm: Algorithm) -> float:
    """Return the learning rate of a parameter relative to that of the step.

    The entries of AdamW's update have the same size at every width. They are correlated with the
    activations, so the update of a hidden matrix changes its outputs in proportion to its number of
    columns. Therefore the learning rate is divided by the width (arXiv 2203.03466, table 8).

    Muon's update of a matrix with r rows and c columns is 0.2 sqrt(max(r, c)) times a matrix whose
    singular values are all 1 (arXiv 2502.16982, section 2.2), so its spectral norm grows with the
    square root of the width. Features change by an amount that does not depend on the width if the
    spectral norm of the update is proportional to sqrt(r / c) (arXiv 2310.17813, condition 1),
    which does not depend on the width for hidden matrices. Hence the factor m_N^-1/2.

    The router maps activations to a number of experts that does not grow. A multiplier 1 / m_N of
    its logits and a matrix with the initial scale and learning rate of an output matrix are, for
    AdamW, the same as an initial scale and a learning rate that are both multiplied by 1 / m_N
    (arXiv 2203.03466, lemma J.1). The second form needs no multiplier.

    The factor for the depth is m_L^(alpha - 1), which is 1 for all parameters, because alpha is 1.
    """
    if place.role == "hidden" and algorithm == "muon":
        return 1 / math.sqrt(width_ratio(model))
    return 1 / width_ratio(model) if place.role == "hidden" or place.is_router else 1.0


def weight_decay_factor(model: ModelConfig, place: Place, algorithm: Algorithm) -> float:
    """Return the factor of the weight decay of a matrix.

    The product of weight decay and learning rate is the same as in the base model
    (arXiv 2505.01618, table 1).
    """
    return 1 / learning_rate_factor(model, place, algorithm)


def epsilon_factor(model: ModelConfig, place: Place) -> float:
    """Return the factor of epsilon in AdamW's denominator.

    Gradients are smaller in wider and deeper models: the output multiplier divides all of them by
    m_N, except those of the router, whose logits affect all columns of the residual stream, and the
    residual multiplier divides those of a layer by m_L.
    """
    width = 1.0 if place.is_router else width_ratio(model)
    return 1 / (width * (depth_ratio(model) if place.in_block else 1))


def residual_multiplier(model: ModelConfig) -> float:
    """Return the factor of the outputs of attention and MLP."""
    return 1 / depth_ratio(model)


def output_multiplier(model: ModelConfig) -> float:
    """Return the factor of the logits."""
    return 1 / width_ratio(model)


def query_multiplier(model: ModelConfig) -> float:
    """Return the factor of the queries, for attention that also divides its scores by sqrt(d).

    The scale of the scores is then sqrt(d_base) / d, or `attention_scale` sqrt(d_base / d).
    """
    d = model.score_size
    factor = math.sqrt((model.base_head_size or d) / d)
    return (
        factor if model.attention_scale is None else factor * model.attention_scale * math.sqrt(d)
    )


# Maximum number of elements drawn at a time. A change would change the initial values of every
# parameter that has more elements.
CHUNK_ELEMENTS = 2**20
# Number of consecutive chunks that a thread fills. With tensor parallelism, two threads may both
# draw the chunk at their boundary.
CHUNKS_PER_THREAD = 8
MAX_THREADS = 16  # each holds up to three chunks, about 12 MB


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    *,
    seed: int,
    tensor: TensorAxis | None = None,
    elements: range | None = None,
) -> None:
    """Fill this rank's parts of the parameters.

    Args:
        parameters: pairs of logical name and parameter
        tensor: the tensor axis; None: one rank holds every parameter
        elements: the elements of each flattened part to fill; None: all
    """
    tensor = tensor or TensorAxis()
    draws: list[Callable[[], None]] = []
    for name, parameter in parameters:
        part = parameter.view(-1)
        wanted = range(part.numel()) if elements is None else elements
        values = part[wanted.start : wanted.stop]
        if name.endswith("norm.weight"):
            values.fill_(1)
        elif name.endswith("bias"):
            values.zero_()
        else:
            sharding = sharding_of(parameter)
            std = initial_std(config, place_of(name, sharding.role))
            shape = sharding.shape
            local_elements = partial(sharding.local_elements, tensor=tensor)
            chunk = max(1, rows_of_chunk(shape) * math.prod(shape[1:]) // tensor.size)
            for first in range(0, len(wanted), CHUNKS_PER_THREAD * chunk):
                of_thread = wanted[first : first + CHUNKS_PER_THREAD * chunk]
                draws.append(
                    partial(
                        _draw,
                        values[first : first + len(of_thread)],
                        of_thread,
                        chunk=chunk,
                        std=std,
                        rows=partial(NormalRows, shape, name=name, seed=seed),
                        local_elements=local_elements,
                    )
                )
    run_in_threads(draws)


def _draw(
    values: Tensor,
    elements: range,
    *,
    chunk: int,
    std: float,
    rows: Callable[[], "NormalRows"],
    local_elements: Callable[["NormalRows", range], Tensor],
) -> None:
    """Fill consecutive elements of this rank's part of a parameter, `chunk` at a time."""
    drawn = rows()  # created by the thread, because it holds a chunk for as long as it exists
    for first in range(0, len(elements), chunk):
        piece = elements[first : first + chunk]
        values[first : first + len(piece)] = std * local_elements(drawn, piece)


def run_in_threads(functions: Sequence[Callable[[], None]]) -> None:
    """Run functions without gradients, on all cores of this process if there are several."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(functions))
    if threads <= 1:
        for function in functions:
            function()
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(torch.no_grad()(function)) for function in functions]:
            done.result()


def rows_of_chunk(shape: Sequence[int]) -> int:
    """Return the number of rows of a tensor that are drawn at a time."""
    return max(1, CHUNK_ELEMENTS // math.prod(shape[1:]))


class NormalRows:
    """Rows of a logical tensor of standard normal numbers, a function of seed and name alone.

    Each chunk of rows has its own seed, so that a rank need not draw the rows of others. They are
    drawn on the CPU in fp32, so that neither device nor precision changes them.
    """

    def __init__(self, shape: Sequence[int], *, name: str, seed: int):
        self.shape, self.key = tuple(shape), f"{seed}/{name}"
        self.rows_of_chunk = rows_of_chunk(self.shape)
        self.last: tuple[int, Tensor] | None = None  # number and rows

    def __call__(self, start: int, stop: int) -> Tensor:
        """Return the rows from start to stop, [stop - start, ...] in fp32."""
        numbers = range(start // self.rows_of_chunk, -(-stop // self.rows_of_chunk))
        first = numbers.start * self.rows_of_chunk
        chunks = [self._chunk(number) for number in numbers]
        rows = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return rows[start - first : stop - first]

    def _chunk(self, number: int) -> Tensor:
        if self.last is None or self.last[0] != number:
            self.last = number, self._draw(number)
        return self.last[1]

    def _draw(self, number: int) -> Tensor:
        text = f"{self.key}/{number}" if number else self.key
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        rows = min(self.rows_of_chunk, self.shape[0] - number * self.rows_of_chunk)
        return torch.randn(rows, *self.shape[1:], generator=generator)
