"""The learning rate as a function of the step, so that there is no scheduler to save."""

import math

from threefold.config.optimization import Optimizer

MAX_RATE_CHANGE = 2.0  # ratio of two learning rates above which the change is called a jump


def learning_rate(step: int, optimizer: Optimizer, steps: int) -> float:
    """The learning rate of step 1, 2, ...; a run may end within its warm-up.

    Linear warm-up, which reaches the peak at step `warmup_steps`, then down to the minimum at
    the last step: over all that is left ("cosine", arXiv 1608.03983, or "linear"), or constant
    until the last `decay_steps` and over these as `decay_shape` says ("wsd", warm-up-stable-decay,
    arXiv 2404.06395; "sqrt" is 1 - sqrt of arXiv 2405.18392, equation 1), or never ("constant").
    Later steps have the minimum.

    Args:
        step: number of the step, from the first one of the schedule
        optimizer: the [optimizer] section
        steps: number of steps of the schedule, if it does not set its own (`schedule.steps`)
    """
    peak, schedule = optimizer.learning_rate, optimizer.schedule
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    steps = schedule.steps or steps
    if step >= steps:
        return schedule.minimum_learning_rate
    is_wsd = schedule.decay == "wsd"
    length = schedule.decay_steps if is_wsd else steps - schedule.warmup_steps
    progress = max(0.0, 1 - (steps - step) / length)
    fall = peak - schedule.minimum_learning_rate
    shape = schedule.decay_shape if is_wsd else schedule.decay
    if shape == "cosine":
        return schedule.minimum_learning_rate + fall * (1 + math.cos(math.pi * progress)) / 2
    if shape == "sqrt":
        return schedule.minimum_learning_rate + fall * (1 - math.sqrt(progress))
    return schedule.minimum_learning_rate + fall * (1 - progress)
