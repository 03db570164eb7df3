"""Convert checkpoints and configurations of other programs, on a machine without a GPU.

    python recipes/convert.py to-hf runs/tiny runs/tiny/hugging_face --prompt "def "
    python recipes/convert.py to-hf runs/7b/checkpoints/step-0100000 exported --dtype bf16
    python recipes/convert.py from-hf ~/Qwen3-0.6B data/qwen3
    python recipes/convert.py import megatron/checkpoints imported --recipe recipes/mine.toml
    python recipes/convert.py average runs/7b --last 5 --output averaged
    python recipes/convert.py reshape runs/7b moved --ranks 64 --set layout.tensor=8
    python recipes/convert.py recipe gpt-neox/configs/125M.yml --ranks 8 --output recipes/mine.toml

`recipe` translates a configuration of GPT-NeoX, Megatron-LM, Megatron-DeepSpeed, nanotron,
torchtitan or transformers and reports every key; scripts are read, never executed. `import` reads
checkpoints of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX without executing code.

The others hold one tensor in memory at a time. The checkpoint to read is a checkpoint folder, or a
run folder, of which the newest undamaged checkpoint is taken. It is verified first. The output
folder appears when it is complete; --overwrite replaces an earlier output of the same command if
its files have not changed. To start a run in any layout from the weights that `from-hf` or
`average` writes, name them in training.initial_weights. You never need `reshape` to resume: use it
to check that another layout is valid, and to distribute the tensors over one set of files per rank.
Exit code 0: done; 2: a file or an option is rejected.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt
    from threefold.runtime.output import silence_libraries

    end_at_interrupt()
    silence_libraries()

from threefold.commands.convert import main

if __name__ == "__main__":
    main(__doc__)
