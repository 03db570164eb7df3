"""pretrain.py with a fault on rank 1, chosen by the last part of the recipe's name.

nan: gradients are not finite from step 4 on; sleep: the rank sleeps in step 4; crash: it raises
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":  # the repository is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch.distributed as dist

from recipes import pretrain
from threefold.engine.engine import Engine

healthy, steps = Engine.train_step, []


def train_step(self, micro_batches, learning_rate):
    """Run a step, with the fault from step 4 on."""
    steps.append(learning_rate)
    fault = self.recipe.name.rpartition("-")[2]
    chosen = dist.get_rank() == 1
    if len(steps) < 4 or not chosen:
        return healthy(self, micro_batches, learning_rate)
    if fault == "crash":
        raise RuntimeError("a bug")
    if fault == "sleep":
        time.sleep(10_000)
    weights = [weight for _, weight in self.parameters() if weight.requires_grad]
    hook = weights[0].register_hook(lambda gradient: gradient * float("nan"))
    result = healthy(self, micro_batches, learning_rate)
    hook.remove()
    return result


Engine.train_step = train_step

if __name__ == "__main__":
    pretrain.main()
