"""List of everything that we override in DeepSpeed 0.19.8: upstream's behaviour, ours, the reason.

In `recipes/training/recipe/deepspeed_config.py`:
- `timers`: DeepSpeed's ThroughputTimer synchronises the device when a forward pass begins and when
  `step` ends, two or three times per micro-batch under ZeRO-2 and 3. We turn it off, so that the
  host runs ahead of the device; `tracking.py` measures throughput.
- `steps_per_print`: DeepSpeed's pipeline engine divides by it under `wall_clock_breakdown`, which
  `flops_profiler` turns on too, and fails if it is None. We set a number in that case, and
  otherwise None, because we print ourselves.

In this file:
- `replace_timers`: DeepSpeed's pipeline engine times every batch and never frees the pair of CUDA
  events of each step. We replace the timers by timers that do nothing, unless the JSON asks for
  times.

In `recipes/training/engine/zero_patches.py`:
- `share_fp32_weights`: DeepSpeed's ZeRO-1 and 2 copy fp32 weights to update them. We update them in
  place, which saves 4 bytes per parameter of a rank's share, and a copy per step.
- `gradient_norm`: DeepSpeed copies each gradient to fp64, and leaves out gradients of replicated
  weights on all tensor ranks but the first, even if they are not finite there. We compute norms of
  rows in fp32 and sum them in fp64, and every rank sees a gradient that is not finite.
- `scale_in_update`: DeepSpeed divides all gradients by the loss scale and clips them in a separate
  pass. We let fused AdamW divide each gradient when it reads it.
- `change_loss_scale_after_update`, `scale_in_update_of_group`: ZeRO-3 changes the loss scale before
  it divides, which halves gradients whenever the scale grows. We change it after the update.
- `clip_in_update`: BF16_Optimizer clips in a pass of its own and waits for the norm. We let fused
  AdamW divide each gradient when it reads it.
- `shards_for_norm`: DeepSpeed's BF16_Optimizer reads the gradients of the whole stage, and misses
  non-finite ones as above. We read only a rank's own shard, so that no rank needs the sums of other
  shards.

In `models/pipeline/`:
- `gradients.py`: DeepSpeed copies gradients into buckets and reduces them after the last backward
  pass, and BF16_Optimizer zeroes all of them after each step. We add them to one tensor per
  optimizer group, reduce them to their owners during the last backward pass, and never zero them.
- `process_grid.py`, `stages.py`: DeepSpeed creates the groups of the axes and of tied weights one
  call per group, thousands on 1,000 ranks. We create those of an axis in one call.
- `engine.py`: DeepSpeed runs a fixed schedule with blocking sends and receives. We run any order of
  passes.

Elsewhere:
- `engine.py`, `import_muon`: DeepSpeed's check whether an optimizer is Muon imports torch's
  compiler, which takes most of a second. We avoid that import.
- `processes.py`: DeepSpeed builds `deepspeed_shm_comm` on CPUs, for 30 to 74 s. We skip the build.

These overrides could be removed if DeepSpeed had options for the timers, the norm and the copies,
an argument of `initialize` for the class of the engine, and lazy imports.
"""

import deepspeed
from deepspeed.utils.timer import NoopTimer


def replace_timers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give an engine timers that do nothing, unless the JSON asks for times."""
    if not (engine.wall_clock_breakdown() or engine.flops_profiler_enabled()):
        engine.timers = NoopTimer()
