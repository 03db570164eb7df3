"""Bad numbers: what a step's loss and gradient norm say about going on."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from recipes.training.recipe.sections import Supervision

SKIPPED = 1  # the optimizer has left the step out, and that is enough
UNSAFE = 2  # likewise, but the weights may be what is wrong: no checkpoint of them
ROLL_BACK = 3  # the run should go back
SEEN, NEEDED = 64, 16  # losses that are remembered, and how many it takes to know what is usual


@dataclass(frozen=True)
class Bad:
    """What is wrong with a step.

    severity: SKIPPED, UNSAFE or ROLL_BACK
    """

    reason: str
    severity: int


class LossWatch:
    """Judges step after step; the same on all ranks, since loss and norm are.

    fp16: infinite gradients are how its loss scale finds its value, and no reason to roll back
    losses: of the steps before, if the run is resumed
    """

    def __init__(
        self,
        limits: Supervision,
        *,
        fp16: bool,
        losses: Sequence[float] = (),
    ):
        self.limits, self.fp16 = limits, fp16
        self.bad_steps = 0  # in a row
        self._losses = deque(filter(math.isfinite, losses), maxlen=SEEN)

    def judge(self, loss: float, grad_norm: float) -> Bad | None:
        """The step just done: loss in nats per token, gradient norm before clipping."""
        if math.isfinite(loss) and not math.isfinite(grad_norm) and self.fp16:
            return Bad(f"the gradient norm is {grad_norm}", SKIPPED)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            name, value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
            self.bad_steps += 1
            reason = f"the {name} is {value}"
            if self.bad_steps < self.limits.bad_steps:
                return Bad(reason, UNSAFE)
            row = f", {self.bad_steps} steps in a row" if self.bad_steps > 1 else ""
            return Bad(f"{reason}{row}", ROLL_BACK)
        self.bad_steps = 0
        usual = median(self._losses) if len(self._losses) >= NEEDED else math.inf
        if self.limits.loss_spike and loss > usual + self.limits.loss_spike:
            return Bad(
                f"the loss is {loss:.4f}, more than {self.limits.loss_spike} nats above the "
                f"{usual:.4f} of the steps before",
                ROLL_BACK,
            )
        self._losses.append(loss)
        return None

    def rolled_back(self) -> None:
        """Forget bad steps; the usual loss is kept, or a diverged run would look normal."""
        self.bad_steps = 0
