"""List of everything that we override in DeepSpeed 0.19.8.

Each entry names the override and gives upstream's behaviour, the reason for ours, the gain, and the
upstream change that would make the override removable.

`threefold/config/deepspeed_json.py`

- `timers`. Upstream: ThroughputTimer synchronizes the device when a forward pass begins and when
  `step` ends. Ours: the timer is off. Reason: the host should run ahead of the device, and
  `recipes/training/tracking/` measures throughput. Gain: two or three synchronizations per
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

`threefold/engine/sharded_creation.py`

- `ShardedCreation`. Upstream: `deepspeed.zero.Init` broadcasts each weight of rank 0 to all data
  ranks and then divides it. Ours: each rank fills only its part, without a broadcast, through
  `_convert_to_deepspeed_param` and `partition`. Reason: initial values are a function of seed and
  name. Gain: no rank draws or sends a whole weight. Removable if Init takes a function that fills a
  part.

`threefold/engine/zero_patches.py`

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
- `scale_in_update`. Upstream: a separate pass divides all gradients by the loss scale and clips
  them. Ours: fused AdamW divides each gradient as it reads it. Reason: AdamW has an argument for
  it. Gain: one pass over the gradients. Removable if DeepSpeed passes `grad_scale` to AdamW.
- `change_loss_scale_after_update`, `scale_in_update_of_group`. Upstream: ZeRO-3 changes the loss
  scale before it divides by it. Ours: the scale changes after the update. Reason: upstream's order
  halves the gradients of a step whenever the scale grows. Gain: correctness. Removable if ZeRO-3
  divides by the scale of the backward pass.
- `clip_in_update`. Upstream: BF16_Optimizer clips in a separate pass and waits for the norm. Ours:
  fused AdamW divides each gradient as it reads it. Reason: as for `scale_in_update`. Gain: one pass
  over the gradients and one synchronization. Removable as `scale_in_update` is.
- `shards_for_norm`. Upstream: BF16_Optimizer reads the gradients of the whole stage, and skips
  gradients as described at `gradient_norm`. Ours: each rank reads its own shard. Reason: with
  reductions to the owners, a rank has no sums of other shards. Gain: the reductions below.
  Removable if BF16_Optimizer computes the norm of its partition.

`models/pipeline/`

- `scheduled_engine.py`, `instructions.py`. Upstream: PipelineEngine runs a fixed schedule with
  blocking sends and receives. Ours: a subclass, constructed directly, runs any order of passes and
  communicates in the background. Reason: `deepspeed.initialize` has no argument for the class.
  Gain: all schedules of `schedule/order.py`, and overlap of communication and computation.
  Removable if the schedule becomes an argument.
- `gradients/`, and `config_of_stage` in `threefold/engine/build.py`. Upstream: pipelines
  reject ZeRO-2; gradients are copied into buckets and reduced after the last backward pass, and
  BF16_Optimizer zeroes them after each step. Ours: DeepSpeed is told stage 1, and its hooks are
  removed. Gradients are added to one tensor per optimizer group, summed by one reduce-scatter
  during the last backward pass of a group of micro-batches, and never zeroed. Reason: the hooks
  count the gradients of one backward pass, which deferred weight gradients do not fit. Gain: ZeRO-2
  with pipelines, overlap, half the traffic of an all-reduce, and no copies. Removable if DeepSpeed
  reduces when the caller says that a gradient is final.
- `gathering.py`. Upstream: the optimizer's step ends by gathering the updated weights, and waits.
  Ours: the function that it calls is replaced during the step by one that starts the gathers; each
  layer waits for its own weights. Reason: the first passes of the next step can hide them.
  Gain: overlap. Removable if the optimizer returns handles of its gathers.
- `scheduled_engine.py` (`_aggregate_total_loss`). Upstream: the loss is averaged after the update.
  Ours: before it. Reason: the average would wait for the gathers of the same group. Gain: as for
  `gathering.py`. Removable if DeepSpeed averages the loss first.
- `scheduled_engine.py` (`_configure_distributed_model`), `engine/expert_groups.py`. Upstream: only
  modules of `deepspeed.moe` count as experts. Ours: marked weights do, and their groups are entered
  into `deepspeed.utils.groups`. Reason: our experts are modules of our own. Gain: ZeRO-1 divides
  experts among the ranks that have the same ones. Removable if DeepSpeed decides by the weights'
  attributes.
- `process_grid.py`, `stage.py` (`_index_tied_modules`). Upstream: one call per group creates the
  groups of the axes and of tied weights, thousands of calls on 1,000 ranks. Ours: one call per
  axis. Reason: each call is a collective over all ranks. Gain: start-up time on many ranks.
  Removable if PipelineParallelGrid creates the groups of an axis together.
- `stage.py` (`PipelineParallelGrid`). Upstream: PipelineModule's constructor builds a grid itself.
  Ours: the class is replaced in DeepSpeed's module during that constructor by a function that
  returns our grid. Reason: no argument changes the class. Gain: as for `process_grid.py`. Removable
  if PipelineModule takes a grid.
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
from contextlib import AbstractContextManager

import deepspeed
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import utils
from deepspeed.utils.timer import NoopTimer

from threefold.engine.muon import Muon
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
