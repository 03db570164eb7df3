"""Measure the speed and the memory of a recipe in many layouts.

    python recipes/sweep.py recipes/tiny.toml
    python recipes/sweep.py recipes/tiny.toml --layouts all --halving
    python recipes/sweep.py recipes/tiny.toml --layouts all --rounds 3
    python recipes/sweep.py recipes/mine.toml --set batch.micro_sequences=1,2,4
    python recipes/sweep.py recipes/llama/7b.toml --nodes 1,2,4 --top 5 --hostfile hosts
    sbatch --nodes=4 slurm/sweep.slurm recipes/llama/7b.toml
    python recipes/sweep.py learning-rates recipes/tiny.toml --widths 96,192,384
    python recipes/sweep.py coordinates recipes/tiny.toml --widths 96,192,384
    python recipes/sweep.py links my-node
    python recipes/sweep.py links my-cluster --nodes 2 --gpus-per-node 8 --gpu H100 \\
        --hostfile hosts

By default, the ten layouts that the planner predicts to be the fastest are measured, each for five
steps after two steps of warm-up, on synthetic data. Every trial ends as ok, out_of_memory, hung,
crashed, rejected or too_large, and is a row of sweep.csv in the sweep folder. Rerun the same
command to continue an interrupted sweep; several commands may share a folder.

The command learning-rates trains each recipe at several learning rates; coordinates measures the
sizes of its activations in the first steps. Both compare widths of a model. links measures no
recipe, but the matmul rate of each GPU and the bandwidth and latency of the links, and writes a
datasheet of this cluster for the planner. Each of these commands has its own --help.

Exit code 0: every trial was measured, ran out of memory or was rejected; 1: a trial or links hung
or crashed, or the command stopped; 2: a recipe or an option is invalid.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.sweep import main

if __name__ == "__main__":
    main(__doc__)
