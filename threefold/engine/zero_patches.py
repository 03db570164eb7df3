"""Changes to DeepSpeed's optimizers: gradient norm, loss scale and clipping, with fewer passes."""

from collections.abc import Iterable, Iterator
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from torch import Tensor, nn

ROW_ELEMENTS = 512  # number of elements that are summed in fp32


def without_needless_copies(optimizer: object) -> None:
    """Apply the changes of this file to an optimizer that DeepSpeed has created."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        share_fp32_weights(optimizer)
        optimizer.scaled_global_norm = MethodType(norm_of_all_groups, optimizer)
        optimizer.has_moe_layers = False  # otherwise DeepSpeed changes the norm
        optimizer.unscale_and_clip_grads = MethodType(scale_in_update, optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.get_grad_norm_direct = MethodType(gradient_norm, optimizer)
        change_loss_scale_after_update(optimizer)
        optimizer.unscale_and_clip_grads = MethodType(scale_in_update_of_group, optimizer)
    elif isinstance(optimizer, BF16_Optimizer):
        optimizer.get_grads_for_norm = MethodType(shards_for_norm, optimizer)
        optimizer.has_moe_layers = False  # otherwise DeepSpeed changes the norm
        clip_in_update(optimizer)


def share_fp32_weights(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the optimizer update fp32 weights in place, instead of a copy."""
    partitions = optimizer.parallel_partitioned_bit16_groups
    for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
        own = partitions[number][dist.get_rank(optimizer.real_dp_process_group[number])]
        if own.dtype == master.dtype:
            master.data = own
    optimizer._link_all_hp_params()  # so that parameters point to their parts


def gradient_norm(
    self: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3,
    gradients: Iterable[Tensor],
    params: Iterable[nn.Parameter],
) -> Tensor:
    """Replace DeepSpeed's get_grad_norm_direct, which would copy each gradient to fp64 first.

    DeepSpeed calls it before it changes the loss scale for the next step, so the current scale is
    noted here.

    Returns:
        The norm, or -1 if any rank has a value that is not finite.
    """
    return norm_of_parts(self, without_padding(gradients, params))


def without_padding(
    gradients: Iterable[Tensor], params: Iterable[nn.Parameter]
) -> Iterator[tuple[Tensor, nn.Parameter]]:
    """Yield each gradient of an optimizer group with its parameter, without DeepSpeed's padding."""
    gradients = (each for each in gradients if not getattr(each, "_zero_padding", False))
    return zip(gradients, params, strict=False)


def norm_of_parts(
    self: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3,
    parts: Iterable[tuple[Tensor, nn.Parameter]],
) -> Tensor:
    """Return the norm of all ranks' parts; -1 if any rank has a value that is not finite."""
    self.scale_of_gradients = self.loss_scale
    total = sum_of_squares(parts, self.model_parallel_rank, self.device)
    dist.all_reduce(total, group=self.dp_process_group)
    self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    norm = total.sqrt()
    stage_1_and_2.mask_nan_or_inf_with_val_inplace(norm, device=self.device)
    return norm


def norm_of_all_groups(self: DeepSpeedZeroOptimizer, norm_type: float = 2) -> Tensor:
    """Replace DeepSpeed's scaled_global_norm, which communicates once per optimizer group.

    Stages may have different numbers of groups, because only some have experts. The sum over the
    data ranks counts each weight once, whichever ranks a group is divided among.

    Returns:
        The norm, including the loss scale; infinite if any rank has a value that is not finite.
    """
    numbers = range(len(self.bit16_groups))
    groups = (
        without_padding(self.averaged_gradients[number], self.params_in_partition[number])
        for number in numbers
    )
    norm = norm_of_parts(self, chain.from_iterable(groups))
    return torch.where(norm < 0, torch.inf, norm)


def shards_for_norm(
    self: BF16_Optimizer, for_clipping: bool = False
) -> list[Tensor] | tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Replace DeepSpeed's get_grads_for_norm, which reads the gradients of the whole stage.

    A rank has only the average of its own shard (`threefold/pipeline/gradients.py`).

    Returns:
        For clipping, the shards. For the norm, a list with one number, the norm over the shards of
        all data ranks; DeepSpeed adds the norms of tensor ranks and stages.
    """
    shards = self.fp32_groups_gradient_flat_partition
    if for_clipping:
        return list(shards)
    places = (
        (shard, parameter, parameter._hp_mapping.hp_fragment_address)
        for shard, group in zip(shards, self.bf16_groups, strict=True)
        for parameter in group
        if parameter._hp_mapping is not None  # this rank owns a part
    )
    parts = ((shard[at.start : at.start + at.numel], each) for shard, each, at in places)
    tensor_rank = bwc_tensor_model_parallel_rank(mpu=self.mpu)
    total = sum_of_squares(parts, tensor_rank, shards[0].device)
    dist.all_reduce(total, group=self.dp_process_group)
    return [total.sqrt()], {}


def sum_of_squares(
    parts: Iterable[tuple[Tensor, nn.Parameter]], tensor_rank: int, device: torch.device | str
) -> Tensor:
    """Add up the squares of the gradients that count on this rank, in fp32.

    Replicated weights count on the first tensor rank only, tied weights on one stage only. On other
    ranks their squares count as zero, unless a value is not finite, which makes the sum NaN.
    DeepSpeed ignores these gradients entirely: a rank with a non-finite one would then update its
    weights, because the norm is finite.
    """
    counted: list[Tensor] = []
    others: list[Tensor] = []
    for gradient, parameter in parts:
        split = stage_1_and_2.is_model_parallel_parameter(parameter)
        tied = getattr(parameter, "ds_pipe_replicated", False)
        found = counted if not tied and (split or tensor_rank == 0) else others
        found.append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for each in adjacent(counted):
        total += squared_norm(each)
    for each in adjacent(others):
        total += 0.0 * squared_norm(each)
    return total.float()


def adjacent(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Flatten tensors and join those that are adjacent in memory, so that fewer kernels run."""
    joined: list[Tensor] = []
    for each in tensors:
        if joined and _follows(each, joined[-1]):
            last = joined.pop()
            size = last.numel() + each.numel()
            each = last.as_strided((size,), (1,), last.storage_offset())
        joined.append(each.flatten())
    return joined


def _follows(tensor: Tensor, other: Tensor) -> bool:
    same = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    end = other.storage_offset() + other.numel()
    return same and tensor.is_contiguous() and tensor.storage_offset() == end


def scale_in_update(self: DeepSpeedZeroOptimizer, gradients: list[Tensor], norm: Tensor) -> None:
    """Replace DeepSpeed's unscale_and_clip_grads: fused AdamW divides gradients as it reads them.

    The divisor is the loss scale with which the gradients were computed. DeepSpeed uses the scale
    of the next step, and thus halves the gradients whenever the scale doubles.

    norm: norm of the gradients, including the loss scale
    """
    loss_scale = self.scale_of_gradients
    scale = torch.full((), loss_scale, dtype=torch.float32, device=self.device)
    if self.clip_grad > 0:
        scale *= ((norm / loss_scale + 1e-6) / self.clip_grad).clamp(min=1.0)
    self.optimizer.grad_scale = scale


def scale_in_update_of_group(
    self: DeepSpeedZeroOptimizer_Stage3, sub_group_id: int, norm: Tensor
) -> None:
    """Replace ZeRO-3's unscale_and_clip_grads, called for each sub-group, by `scale_in_update`."""
    self.scale_of_gradients = self.loss_scale
    scale_in_update(self, [], norm)


def change_loss_scale_after_update(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let ZeRO-3 divide gradients and their norm by the loss scale that they were computed with.

    DeepSpeed's step changes the scale for the next step before it divides, which halves gradients
    and norm whenever the scale grows. Where gradients overflow, nothing is divided.
    """
    step, change_scale = optimizer.step, optimizer._update_scale

    def change_after_overflow(has_overflow: bool = False) -> None:
        if has_overflow:
            change_scale(True)

    def step_and_change_scale(*arguments: Any, **settings: Any) -> None:
        step(*arguments, **settings)
        if not optimizer.overflow:
            change_scale(False)

    optimizer._update_scale, optimizer.step = change_after_overflow, step_and_change_scale


def clip_in_update(optimizer: BF16_Optimizer) -> None:
    """Leave clipping to fused AdamW, which divides the gradients that it reads.

    DeepSpeed would multiply all gradients in a separate pass, and wait for the device to decide
    whether that pass is needed.
    """
    most, optimizer.clip_grad = optimizer.clip_grad, 0.0
    if most == 0:
        return

    def divide_by_excess(adamw: Any, *call: Any) -> None:
        norm = optimizer._global_grad_norm
        adamw.grad_scale = ((norm + 1e-6) / most).clamp(min=1.0).float()

    optimizer.optimizer.register_step_pre_hook(divide_by_excess)


def squared_norm(gradient: Tensor) -> Tensor:
    """Return the squared norm in fp64, from norms of rows in fp32 (relative error below 1e-6)."""
    flat = gradient.detach().flatten().float()
    whole = flat.numel() - flat.numel() % ROW_ELEMENTS
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW_ELEMENTS), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return rows.double().square().sum() + rest.double().square()
