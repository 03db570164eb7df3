"""Simulate the error of a gradient's sum over the data ranks, in bf16 and in fp32.

NCCL's ring passes a partial sum from rank to rank. Each rank adds its own contribution and rounds
to the precision of the communication, so an element is rounded once per rank. In the simulation,
the contribution of a rank to an element is the mean gradient of the element plus random noise. The
error is the norm of the difference from the exact sum, relative to the norm of the exact sum.

noise: standard deviation of a rank's gradient divided by its mean. If the global batch has the
critical size (McCandlish et al. 2018, arXiv 1812.06162), it is about the square root of the number
of ranks; it is smaller with larger batches.

    python benchmarks/reduction_error.py [--json]
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from collections.abc import Iterator, Sequence

import torch

from threefold.runtime.output import stdout_for_json

RANKS = (2, 8, 32, 128, 512, 1024)
NOISES = (1.0, 4.0, 16.0)
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
ELEMENTS = 2**14


def ring_errors(
    ranks: Sequence[int], noise: float, *, elements: int = ELEMENTS, seed: int = 0
) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (number of ranks, relative error by precision), by ascending number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(elements, generator=generator)
    exact = torch.zeros(elements, dtype=torch.float64)
    sums = {name: torch.zeros(elements, dtype=dtype) for name, dtype in PRECISIONS.items()}
    for rank in range(1, max(ranks) + 1):
        contribution = mean + noise * torch.randn(elements, generator=generator)
        exact += contribution
        for partial_sum in sums.values():
            partial_sum += contribution.to(partial_sum.dtype)
        if rank in ranks:
            errors = {name: (each.double() - exact).norm() for name, each in sums.items()}
            yield rank, {name: float(error / exact.norm()) for name, error in errors.items()}


def table(errors: dict[float, dict[int, dict[str, float]]]) -> str:
    """Format the errors as a Markdown table with a row per number of ranks."""
    columns = [(noise, name) for noise in errors for name in PRECISIONS]
    lines = [
        f"| ranks | {' | '.join(f'{name}, noise {noise:g}' for noise, name in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for ranks in next(iter(errors.values())):
        cells = (f"{errors[noise][ranks][name]:.1e}" for noise, name in columns)
        lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or the numbers as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with stdout_for_json(options.json):
        errors = {noise: dict(ring_errors(RANKS, noise)) for noise in NOISES}
    print(json.dumps(errors) if options.json else table(errors))


if __name__ == "__main__":
    main()
