"""Prove that a recipe trains with the same loss, gradient norm and weights in every layout.

The command shrinks the recipe (all switches of its architecture stay), trains it once in one
process, and then in every valid combination of tensor x pipeline x context x data x ZeRO x schedule
x sequence parallelism x recomputation x micro-batch size on up to --ranks processes, on the CPU and
in the recipe's precision (fp32 or bf16). In bf16, the limits are derived from perturbed runs of one
process. If a layout fails, the report names the module and the axis at fault. You need neither a
GPU nor a corpus. Exit code 0: all layouts agree up to rounding; 1: some differ; 2: the recipe or an
option is invalid, or the report or a picture cannot be written; 129, 130 or 143: interrupted by a
signal, with a report of the layouts that were finished.

With --relay one run passes through all layouts, from the largest worlds down to one process and up
again, in random order within a size. Each layout loads the checkpoint of the previous one, must
hold the same weights and moments bit for bit, runs a step, saves, and continues; the next layout
must then have the same losses.

    python recipes/prove.py recipes/tiny.toml
    python recipes/prove.py recipes/llama/7b.toml --ranks 4 --layouts
    python recipes/prove.py recipes/llama/7b.toml --sample 100 --precision fp32
    python recipes/prove.py recipes/llama/7b.toml --only schedule=zb-v,zb-h1 --only zero=2
    python recipes/prove.py recipes/mine.toml --json > proof.json
    python recipes/prove.py recipes/mine.toml --heatmap proof.png
    python recipes/prove.py recipes/mine.toml --relay
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.prove import main

if __name__ == "__main__":
    main(__doc__)
