"""Initial values of all parameters, the same in every layout.

A rank draws only the chunks of rows that contain elements of its part; a chunk has about 4 MB. All
cores of the rank draw chunks at the same time, which does not change their values.

| parameter                                    | initial value                                |
|----------------------------------------------|----------------------------------------------|
| norm weights                                 | 1                                            |
| biases                                       | 0                                            |
| weights that write into the residual stream  | normal, initial_std / sqrt(2 layers) (GPT-2) |
| all other weights, embeddings included       | normal, initial_std                          |

The parametrizations "mup" and "completep" change the standard deviations of matrices in the layers,
but not the normal numbers that they multiply (`models/factors.py`).
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.factors import initial_std
from models.roles import place_of
from models.sharding import sharding_of

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
    tensor_rank: int,
    tensor_size: int,
    elements: range | None = None,
) -> None:
    """Fill this rank's parts of the parameters.

    Args:
        parameters: pairs of logical name and parameter
        config: the model
        seed: seed of the run
        tensor_rank: rank along the tensor axis
        tensor_size: number of ranks along the tensor axis
        elements: the elements of each flattened part to fill; None: all
    """
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
            local_elements = partial(
                sharding.local_elements, tensor_rank=tensor_rank, tensor_size=tensor_size
            )
            chunk = max(1, rows_of_chunk(shape) * math.prod(shape[1:]) // tensor_size)
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
