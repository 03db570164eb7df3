"""Pretrain on several nodes, and continue on what is left when nodes fail.

    python recipes/launch.py --hostfile hosts recipes/llama/7b.toml
    python recipes/launch.py recipes/llama/7b.toml                    # in a Slurm job
    python recipes/launch.py --hostfile hosts --launcher local recipes/mine.toml   # on one machine

The ranks run recipes/pretrain.py, with the same options. If a node is lost, the ranks are started
again on the remaining nodes. With fewer nodes, the run keeps its layout with fewer data ranks,
unless the planner predicts another layout to be faster. It resumes from the newest snapshot in
memory or checkpoint. The loss does not depend on the layout, so the loss curve does not show the
restart.
Nodes that return are used again. events.jsonl in the run folder records every start and its reason.

A hostfile has a line "NAME slots=N" per host, like that of deepspeed. Hosts beyond cluster.nodes
are spare. A recipe without a [cluster] section uses all hosts. The exit codes are those of
pretrain.py; 130: Ctrl-C before any ranks were started; 137: a second Ctrl-C has killed the ranks
before they had saved.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.launch import main

if __name__ == "__main__":
    main(__doc__)
