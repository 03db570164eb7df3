"""DeepSpeed's ZeRO-1 and ZeRO-2 optimizer without the copies that it makes for nothing."""

from collections.abc import Iterable
from types import MethodType

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

ROW = 512  # elements that are added up in fp32


def without_needless_copies(optimizer: object) -> None:
    """Let an optimizer that DeepSpeed has made use what is there, if it is of this kind."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        share_fp32_weights(optimizer)
        optimizer.get_grad_norm_direct = MethodType(gradient_norm, optimizer)
        optimizer.unscale_and_clip_grads = MethodType(scale_in_update, optimizer)


def share_fp32_weights(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the optimizer update weights that are in fp32 where they are, instead of a copy."""
    partitions = optimizer.parallel_partitioned_bit16_groups
    for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
        own = partitions[number][dist.get_rank(optimizer.real_dp_process_group[number])]
        if own.dtype == master.dtype:
            master.data = own
    optimizer._link_all_hp_params()  # parameters know where their part of it is


def gradient_norm(
    self: DeepSpeedZeroOptimizer, gradients: Iterable[Tensor], params: Iterable[nn.Parameter]
) -> Tensor:
    """DeepSpeed's get_grad_norm_direct, which would copy each gradient to fp64 first.

    It comes before the loss scale is changed for the next step.
    """
    self.scale_of_gradients = self.loss_scale
    gradients = (each for each in gradients if not getattr(each, "_zero_padding", False))
    own = [
        squared_norm(gradient)
        for gradient, parameter in zip(gradients, params, strict=False)
        if not getattr(parameter, "ds_pipe_replicated", False)
        and (stage_1_and_2.is_model_parallel_parameter(parameter) or self.model_parallel_rank == 0)
    ]
    total = torch.stack(own).sum().float() if own else torch.zeros((), device=self.device)
    dist.all_reduce(total, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    norm = total.sqrt()
    stage_1_and_2.mask_nan_or_inf_with_val_inplace(norm, device=self.device)
    return norm


def scale_in_update(self: DeepSpeedZeroOptimizer, gradients: list[Tensor], norm: Tensor) -> None:
    """DeepSpeed's unscale_and_clip_grads, left to fused AdamW: it divides what it reads.

    By the loss scale that the gradients have; DeepSpeed's takes the next step's, and halves the
    gradients whenever the scale doubles.

    norm: of the gradients as they are, with the loss scale
    """
    loss_scale = self.scale_of_gradients
    scale = torch.full((), loss_scale, dtype=torch.float32, device=self.device)
    if self.clip_grad > 0:
        scale *= ((norm / loss_scale + 1e-6) / self.clip_grad).clamp(min=1.0)
    self.optimizer.grad_scale = scale


def squared_norm(gradient: Tensor) -> Tensor:
    """In fp64, of rows whose norms are computed in fp32: a relative error below 1e-6."""
    flat = gradient.detach().flatten().float()
    whole = flat.numel() - flat.numel() % ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return rows.double().square().sum() + rest.double().square()
