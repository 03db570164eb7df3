"""An exponential moving average of the weights, which training itself never reads.

    average = decay * average + (1 - decay) * weight        (after an update)

It is one more state of the optimizer: an fp32 tensor next to the moments of each flat tensor of
weights. Everything that shards, saves and loads moments therefore handles the average, too. Its
update needs no communication, because each rank has the weights of its own part.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from threefold.checkpoint.state import AVERAGE, WEIGHTS, TrainingState
from threefold.config.optimization import Average

SWAPPED_ELEMENTS = 2**24  # at a time, so that exchanging weights and average needs little memory


class WeightAverage:
    """Averages the weights of this rank, and lends the average to the model for an evaluation.

    The number of updates is counted on the host, for each flat tensor, because DeepSpeed calls the
    optimizer with some groups at a time. The count in the optimizer's state is on the device, and
    reading it in each step would wait for the device.

    Args:
        state: this rank's share of weights and optimizer state, which includes the average
    """

    def __init__(self, state: TrainingState, settings: Average):
        self.state, self.settings = state, settings
        self.updates = [0] * len(state.weights)
        state.tensors()  # creates the average, with the initial weights

    def resume(self, updates: int) -> None:
        """Continue after a number of updates, as after a checkpoint is loaded."""
        self.updates = [updates] * len(self.updates)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the weights that an optimizer step has just updated.

        A step that is skipped, such as after an overflow in fp16, does not call the optimizer, and
        so leaves the average as it is. Within a step, each call has other flat tensors.
        """
        updated = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        averages, weights = [], []
        for number, flat in enumerate(self.state.weights):
            if id(flat) not in updated:
                continue
            self.updates[number] += 1
            average = optimizer.state[flat][AVERAGE]
            if self.updates[number] <= self.settings.start_step:
                average.copy_(flat)
            elif self.updates[number] % self.settings.every == 0:
                averages.append(average)
                weights.append(flat.detach())
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.settings.decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Let the model compute with the average; collective.

        Weights and average exchange their places, and exchange them again at the end. The weights
        have the same bits afterwards.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for flat in self.state.tensors():
            parts = (flat[kind].split(SWAPPED_ELEMENTS) for kind in (WEIGHTS, AVERAGE))
            for weights, average in zip(*parts, strict=True):
                held = weights.clone()
                weights.copy_(average)
                average.copy_(held)
        self.state.copy_to_model()
