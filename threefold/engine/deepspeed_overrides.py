"""List of everything that we override in DeepSpeed 0.19.8.

Each entry names the override and gives upstream's behaviour, the reason for ours, the gain, and the
upstream change that would make the override removable.

`threefold/config/deepspeed_json.py`

- `timers`. Upstream: ThroughputTimer synchronizes the device when a forward pass begins and when
  `step` ends. Ours: the timer is off. Reason: the host should run ahead of the device, and
  `threefold/tracking/` measures throughput. Gain: two or three synchronizations per
  micro-batch under ZeRO-3. Removable if the timer does not synchronize by default.

`threefold/engine/deepspeed_overrides.py`

- `replace_timers`. Upstream: the pipeline engine times every batch and never frees the pair of CUDA
  events of each step. Ours: timers that do nothing. Reason: the events of a long run accumulate.
  Gain: constant memory, and no synchronization per batch. Removable if the engine creates its
  timers only under `wall_clock_breakdown`, which the JSON cannot set here.
- `allow_muon`. Upstream: ZeRO accepts only optimizers in a list of types, unless the JSON has
  `zero_allow_untested_optimizer`, which warns. Ours: our Muon is in the list. Reason: it is tested.
  Gain: no warning, and no key to set. Removable if the list becomes an argument.
- `import_muon`. Upstream: the check whether an optimizer is Muon imports Muon, whose decorators
  import torch's compiler. Ours: the module is imported with the compiler disabled. Reason: no
  optimizer of ours is DeepSpeed's Muon. Gain: most of a second of start-up. Removable if Muon is
  imported only for a Muon optimizer.
- `without_memory_reports`. Upstream: BF16_Optimizer's constructor reports the memory twice per
  optimizer group, each time after a full garbage collection. Ours: no reports. Reason: their text
  is suppressed, and each bucket is a group. Gain: 0.4 s per group, a minute of start-up for 80
  buckets. Removable if the reports become optional.
- `share_fp32_weights`. Upstream: ZeRO-1 and 2 update a copy of fp32 weights. Ours: the weights are
  updated in place. Reason: the copy has the same type. Gain: 4 bytes per parameter of a rank's
  shard, and one copy per step. Removable if the optimizer shares tensors of equal type.
- `gradient_norm`. Upstream: each gradient is copied to fp64, and the gradients of replicated
  weights are skipped on all tensor ranks but the first, even if they are not finite. Ours: norms of
  rows in fp32, summed in fp64, over all gradients. Reason: every rank must notice a gradient that
  is not finite, or replicas diverge. Gain: a copy of 8 bytes per element, and correctness.
  Removable if DeepSpeed's norm checks skipped gradients and sums without the copy.
- `norm_of_all_groups`, and `has_moe_layers` set to False once the optimizer is built. Upstream:
  each optimizer group is a collective of its own, and the norms of experts are averaged over ranks.
  Ours: one sum over all groups. Reason: stages without experts have fewer groups, so others would
  wait for them; and the average is not the norm. Gain: correctness, and one collective per step
  instead of two. Removable if DeepSpeed sums the groups first and counts each expert once.
- `keep_views`. Upstream: after each step, every weight is set to its part of the flat tensor again.
  Ours: only if it is not that part yet. Gain: 0.2 ms per 30 weights. Removable if DeepSpeed checks.
- `scale_in_update`. Upstream: a separate pass divides all gradients by the loss scale and clips
  them. Ours: fused AdamW divides each gradient as it reads it. Reason: AdamW has an argument for
  it. Gain: one pass over the gradients. Removable if DeepSpeed passes `grad_scale` to AdamW.
- `change_loss_scale_after_update`, `scale_in_update_of_group`. Upstream: ZeRO-3 changes the loss
  scale before it divides by it. Ours: the scale changes after the update. Reason: upstream's order
  halves the gradients of a step whenever the scale grows. Gain: correctness. Removable if ZeRO-3
  divides by the scale of the backward pass.
- `reduce_scatter_together`. Upstream: ZeRO-3 makes a slice of each gradient for each data rank, and
  joins all slices. Ours: two copies per gradient. Reason: with 8,192 data ranks, slices take 0.04 s
  of a CPU core per gradient and micro-batch (AMD EPYC). Gain: this time. Removable if DeepSpeed
  copies each gradient as a matrix.
- `clip_in_update`. Upstream: BF16_Optimizer clips in a separate pass and waits for the norm. Ours:
  fused AdamW divides each gradient as it reads it. Reason: as for `scale_in_update`. Gain: one pass
  over the gradients and one synchronization. Removable as `scale_in_update` is.
- `shards_for_norm`. Upstream: BF16_Optimizer reads the gradients of the whole stage, and skips
  gradients as described at `gradient_norm`. Ours: each rank reads its own shard. Reason: with
  reductions to the owners, a rank has no sums of other shards. Gain: the reductions below.
  Removable if BF16_Optimizer computes the norm of its partition.

`threefold/engine/build.py`

- `ShardedCreation`. Upstream: `deepspeed.zero.Init` broadcasts each weight of rank 0 to all data
  ranks and then divides it. Ours: each rank fills only its part, without a broadcast, through
  `_convert_to_deepspeed_param` and `partition`. Reason: initial values are a function of seed and
  name. Gain: no rank draws or sends a whole weight. Removable if Init takes a function that fills a
  part.

- `_enable_mem_efficient_linear`. Upstream: `deepspeed.zero.Init` calls it in its context manager,
  and it replaces `F.linear` for good. Ours: called directly, and `build_model` restores `F.linear`
  first. Reason: `ShardedCreation` has no context, and the ranks of proofs and sweeps build models
  with other stages later. Gain: gathered weights are freed before the backward pass. Removable with
  `ShardedCreation`.

`threefold/engine/engine.py`

- `gradient_accumulation_steps`. Upstream: `set_train_batch_size` changes the engine's number of
  micro-batches, but not the copy that the optimizer holds. Ours: both. Reason: a batch ramp.
  Removable if the optimizer asks the engine.
- `micro_steps`. Upstream: ZeRO-3 updates when the number of micro-batches since the engine was
  built is a multiple of that of a step. Ours: the count begins anew in each step. Reason: a batch
  ramp. Removable if `set_train_batch_size` resets the count.

`threefold/pipeline/`

- `engine.py`. Upstream: PipelineEngine runs a fixed schedule with blocking sends and receives.
  Ours: a subclass, constructed directly, runs any order of passes and communicates in the
  background. Reason: `deepspeed.initialize` has no argument for the class. Gain: all schedules of
  `schedules.py`, and overlap of communication and computation. Removable if the schedule becomes an
  argument.
- `gradients.py`, and `config_of_stage` in `threefold/engine/build.py`. Upstream: pipelines
  reject ZeRO-2; gradients are copied into buckets and reduced after the last backward pass, and
  BF16_Optimizer zeroes them after each step. Ours: DeepSpeed is told stage 1, and its hooks are
  removed. Gradients are added to one tensor per optimizer group, summed by one reduce-scatter
  during the last backward pass of a group of micro-batches, and never zeroed. Reason: the hooks
  count the gradients of one backward pass, which deferred weight gradients do not fit. Gain: ZeRO-2
  with pipelines, overlap, half the traffic of an all-reduce, and no copies. Removable if DeepSpeed
  reduces when the caller says that a gradient is final.
- `weight_gathering.py`. Upstream: the optimizer's step ends by gathering the updated weights, and
  waits. Ours: the function that it calls is replaced during the step by one that starts the
  gathers; each layer waits for its own weights. Reason: the first passes of the next step can hide
  them. Gain: overlap. Removable if the optimizer returns handles of its gathers.
- `engine.py` (`_aggregate_total_loss`). Upstream: the loss is averaged after the update.
  Ours: before it. Reason: the average would wait for the gathers of the same group. Gain: as for
  `weight_gathering.py`. Removable if DeepSpeed averages the loss first.
- `engine.py` (`seq_data_parallel_group`). Upstream: the optimizer state is divided among all data
  ranks. Ours: among `layout.dp_shard` of them, because the attribute is set to their group.
  Reason: hybrid sharding exists for ZeRO-3 only. Gain: sums and gathers inside a node. Removable
  if ZeRO-1 takes a size of the groups.
- `engine.py` (`_configure_distributed_model`), `threefold/engine/experts.py`. Upstream: only
  modules of `deepspeed.moe` count as experts. Ours: marked weights do, and their groups are entered
  into `deepspeed.utils.groups`. Reason: our experts are modules of our own. Gain: ZeRO-1 divides
  experts among the ranks that have the same ones. Removable if DeepSpeed decides by the weights'
  attributes.
- `threefold/engine/axes.py` (`ProcessGrid`) and `stage.py` (`_index_tied_modules`). Upstream: one
  call per group creates the groups of the axes and of tied weights, thousands of calls on 1,000
  ranks. Ours: one call per axis. Reason: each call is a collective over all ranks. Gain: start-up
  time on many ranks. Removable if PipelineParallelGrid creates the groups of an axis together.
- `stage.py` (`PipelineParallelGrid`). Upstream: PipelineModule's constructor builds a grid itself.
  Ours: the class is replaced in DeepSpeed's module during that constructor by a function that
  returns our grid. Reason: no argument changes the class. Gain: as for `ProcessGrid`. Removable
  if PipelineModule takes a grid.
- `stage.py` (`_partition_layers`, `_build`, `stage_owner`, `train`), `engine.py`
  (`is_last_stage`, `_loss_stage_global_rank`). Upstream: a stage holds one range of layers, the
  last stage computes the loss, and `train` visits all modules in each step. Ours: a range for each
  chunk, in any order of stages, and no visit without a change. Reason: schedules with several
  chunks. Removable if PipelineModule takes the bounds of chunks.
- `stage.py` (`_synchronize_tied_weights`). Upstream: tied weights are broadcast. Ours: nothing.
  Reason: the initialization makes all replicas equal. Gain: no collective and no warning. Removable
  if the broadcast becomes optional.

`threefold/runtime/processes.py`

- The build of `deepspeed_shm_comm`. Upstream: `init_distributed` probes the compiler, libraries and
  GPUs for every operation of DeepSpeed, and compiles this one on CPUs. Ours: no operation counts as
  compatible, so both are skipped. Reason: it serves inference. Gain: 30 to 74 s of start-up, and
  0.3 s for the probes. Removable if the build is optional.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from types import MethodType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.runtime.zero import stage3, stage_1_and_2, utils
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from deepspeed.utils.timer import NoopTimer
from torch import Tensor, nn

from threefold.engine.optimizer import Muon
from threefold.pipeline.stage import replaced

COMPILER_SWITCH = "TORCHDYNAMO_DISABLE"  # a variable that torch reads


def replace_timers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give an engine timers that do nothing."""
    engine.timers = NoopTimer()


def allow_muon() -> None:
    """Let DeepSpeed's check of optimizers pass for our Muon."""
    if Muon not in utils.ZERO_SUPPORTED_OPTIMIZERS:
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(Muon)


def without_memory_reports() -> AbstractContextManager[None]:
    """Let BF16_Optimizer's constructor report no memory, and so collect no garbage."""
    return replaced(bf16_optimizer, "see_memory_usage", lambda message, force=False: None)


def import_muon() -> None:
    """Import Muon with torch's compiler disabled, before DeepSpeed imports it with the compiler."""
    is_set = COMPILER_SWITCH in os.environ
    os.environ.setdefault(COMPILER_SWITCH, "1")
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        if not is_set:
            del os.environ[COMPILER_SWITCH]


# Changes to DeepSpeed's optimizers: gradient norm, loss scale and clipping, with fewer passes.

ROW_ELEMENTS = 512  # number of elements that are summed in fp32


def override_optimizer(optimizer: object) -> None:
    """Apply the changes of this file to an optimizer that DeepSpeed has created."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        share_fp32_weights(optimizer)
        keep_views(optimizer)
        optimizer.scaled_global_norm = MethodType(norm_of_all_groups, optimizer)
        optimizer.has_moe_layers = False  # otherwise DeepSpeed changes the norm
        optimizer.unscale_and_clip_grads = MethodType(scale_in_update, optimizer)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer.get_grad_norm_direct = MethodType(gradient_norm, optimizer)
        change_loss_scale_after_update(optimizer)
        stage3.reduce_scatter_coalesced = reduce_scatter_together
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


def keep_views(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Set the weights of a group to parts of their flat tensor only if they are not yet."""
    set_views = optimizer._update_model_bit16_weights

    def set_missing_views(number: int) -> None:
        first, flat = optimizer.bit16_groups[number][0], optimizer.bit16_groups_flat[number]
        if first.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            set_views(number)

    optimizer._update_model_bit16_weights = set_missing_views


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
    gradients = (grad for grad in gradients if not getattr(grad, "_zero_padding", False))
    return zip(gradients, params, strict=False)


def norm_of_parts(
    self: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3,
    parts: Iterable[tuple[Tensor, nn.Parameter]],
) -> Tensor:
    """Return the norm of all ranks' parts; -1 if any rank has a value that is not finite."""
    self.scale_of_gradients = self.loss_scale
    total = sum_of_squares(parts, self.model_parallel_rank, self.device)
    if dist.get_world_size(self.dp_process_group) > 1:  # otherwise it costs half a millisecond
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
    parts = ((shard[at.start : at.start + at.numel], gradient) for shard, gradient, at in places)
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
        addends = counted if not tied and (split or tensor_rank == 0) else others
        addends.append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in adjacent(counted):
        total += squared_norm(tensor)
    for tensor in adjacent(others):
        total += 0.0 * squared_norm(tensor)
    return total.float()


def adjacent(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Flatten tensors and join those that are adjacent in memory, so that fewer kernels run."""
    joined: list[Tensor] = []
    for tensor in tensors:
        if joined and _follows(tensor, joined[-1]):
            last = joined.pop()
            size = last.numel() + tensor.numel()
            tensor = last.as_strided((size,), (1,), last.storage_offset())
        joined.append(tensor.flatten())
    return joined


def _follows(tensor: Tensor, other: Tensor) -> bool:
    same = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    end = other.storage_offset() + other.numel()
    return same and tensor.is_contiguous() and tensor.storage_offset() == end


def scale_in_update(self: DeepSpeedZeroOptimizer, gradients: list[Tensor], norm: Tensor) -> None:
    """Replace DeepSpeed's unscale_and_clip_grads: fused AdamW divides gradients as it reads them.

    The divisor is the loss scale with which the gradients were computed. DeepSpeed uses the scale
    of the next step, and thus halves the gradients whenever the scale doubles.
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


def reduce_scatter_together(
    tensors: list[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Replace DeepSpeed's reduce_scatter_coalesced: average gradients in one reduce-scatter.

    Args:
        tensors: gradients of any sizes; the average may replace their content
        group: the n ranks that average them

    Returns:
        This rank's part of each flattened gradient: at most ceil(size / n) elements, from
        rank * ceil(size / n) on.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = [-(-tensor.numel() // ranks) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % ranks == 0:
        rows = tensors[0].view(ranks, -1)
    else:
        rows = tensors[0].new_empty(ranks, sum(chunks))  # [n, parts of all gradients for a rank]
        for tensor, columns in zip(tensors, rows.split(chunks, dim=1), strict=True):
            whole = tensor.numel() // max(1, columns.shape[1])  # ranks with a whole part
            flat, end = tensor.view(-1), whole * columns.shape[1]
            columns[:whole] = flat[:end].view(whole, columns.shape[1])
            if end < flat.numel():
                columns[whole, : flat.numel() - end] = flat[end:]
    rows.div_(ranks)
    coalesced_collectives._torch_reduce_scatter_fn(rows.view(-1), rows[rank], group=group)
    counts = [
        min(max(tensor.numel() - rank * chunk, 0), chunk)
        for tensor, chunk in zip(tensors, chunks, strict=True)
    ]
    parts = rows[rank].split(chunks)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


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
