"""The metrics of a step: speed, model FLOP/s utilisation and memory."""

import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from models.cost import flops_per_token
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import peak_tflops
from threefold.run_folder.progress import Progress

if TYPE_CHECKING:
    from threefold.engine.experts import ExpertReport


class Meter:
    """Metrics of a step, computed from its result and duration.

    Args:
        recipe: the recipe of the run, with its phases
        precision: that of the weights; the MFU of matmuls in FP8 is relative to the FP8 peak
        device_name: "cpu", or the name of the GPU
    """

    def __init__(self, recipe: Recipe, world_size: int, *, precision: str, device_name: str):
        self.plan, self.world_size = PhasePlan(recipe), world_size
        kind = recipe.training.matmul_precision
        self.peak_tflops = peak_tflops(device_name, precision if kind == "weights" else kind)
        self.on_gpu = device_name != "cpu"

    def line(
        self, progress: Progress, *, loss: float, grad_norm: float, learning_rate: float,
        seconds: float, experts: "ExpertReport | None" = None,
        prediction_losses: Sequence[float] | None = None, largest_logit: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the metrics of the newest step.

        Args:
            loss: mean loss of the global batch, in nats per token
            grad_norm: gradient norm before clipping
            experts: use of the experts; None for a dense model
            prediction_losses: mean loss of each further token; None if none is predicted
            largest_logit: largest attention logit; None if the optimizer does not limit logits

        Returns:
            The metrics; `mfu` is None if the peak of the device is unknown.
        """
        recipe = self.plan.at(progress.step).recipe
        tokens = recipe.tokens_per_step
        tflops = flops_per_token(recipe.model) * tokens / self.world_size / 1e12 / seconds
        return {
            "step": progress.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": progress.tokens(self.plan),
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tflops_per_gpu": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "memory_gb": peak_memory_gb(self.on_gpu),
            **(expert_metrics(experts) if experts else {}),
            # The first one is the loss of the token after the next one.
            **{
                f"prediction_loss_{depth}": loss
                for depth, loss in enumerate(prediction_losses or (), start=1)
            },
            **({} if largest_logit is None else {"largest_attention_logit": largest_logit}),
        }


def expert_metrics(report: "ExpertReport") -> dict[str, Any]:
    """Return the metrics of the experts' use."""
    return {
        "balance_loss": report.balance_loss,
        "z_loss": report.z_loss,
        "expert_largest_load": report.largest_load,
        "expert_entropy": report.entropy,
        "expert_dropped": report.dropped,
    }


def peak_memory_gb(on_gpu: bool) -> float:
    """Return the peak memory of this process, in 10^9 bytes: on the GPU, or else in the machine."""
    if on_gpu:
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
