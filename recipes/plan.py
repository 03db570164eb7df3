"""Predict a run's memory, step time and fastest layout before you request a GPU.

    python recipes/plan.py recipes/llama/70b.toml
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --gpu H200 --top 3
    python recipes/plan.py recipes/llama/7b.toml --write recipes/7b-planned.toml
    python recipes/plan.py recipes/megatron/1t.toml --software megatron-lm-2021
    python recipes/plan.py recipes/llama/70b.toml --timeline timeline.png --heatmap heatmap.png
    python recipes/plan.py largest recipes/llama/7b.toml --nodes 64 --days 30
    python recipes/plan.py recipes/llama/7b.toml --nodes 16 --network 25 --network-latency 20
    python recipes/plan.py recipes/llama/405b.toml --failures-per-day 8 --storage 200
    python recipes/plan.py trace recipes/llama/405b.toml --rank 0
    python recipes/plan.py recipes/llama/7b.toml --calibrate runs/sweeps/7b/sweep.csv
    python recipes/plan.py table measured.csv --calibrate others.csv
    python recipes/plan.py catalogue

The command largest names the largest model of the recipe's family that is trained in time; trace
runs one rank of the job on fake tensors, and counts the memory it allocates and the bytes it sends;
table compares predictions with measured runs; catalogue prints tables of all shipped recipes. Each
has its own --help. All but trace need neither a GPU nor torch, and take seconds.

Exit code 0: the recipe's layout fits, or largest names a model; 1: it does not fit, or no model is
trained in time; 2: the recipe or an option is rejected, or catalogue cannot plan a shipped recipe.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.plan import main

if __name__ == "__main__":
    main(__doc__)
