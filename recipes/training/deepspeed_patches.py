"""Everything that we override in DeepSpeed 0.19.8: its behaviour, and ours with what it saves.

In `recipes/training/deepspeed_config.py`:
- `timers`: ThroughputTimer synchronises the device when a forward pass begins and when `step` ends,
  two or three times per micro-batch under ZeRO-2 and 3. Off: `tracking.py` measures throughput, and
  the host runs ahead of the device.
- `steps_per_print`: the pipeline engine divides by it under `wall_clock_breakdown`, and fails with
  None. A number then, otherwise None: we print.

In this file:
- `replace_timers`: the pipeline engine times every batch and keeps a pair of CUDA events per step
  for ever. Timers that do nothing, unless the JSON asks for times.

In `recipes/training/zero.py`:
- `share_fp32_weights`: ZeRO-1 and 2 copy fp32 weights to update them. They are updated where they
  are, which saves 4 bytes per parameter of a rank's share, and a copy per step.
- `gradient_norm`: each gradient is copied to fp64, and those of replicated weights are left out on
  all tensor ranks but the first, even if they are not finite there. Rows in fp32 and their sums in
  fp64; every rank sees a broken gradient.
- `scale_in_update`: a pass over all gradients divides them by the loss scale and clips them. Fused
  AdamW divides what it reads.
- `shards_for_norm`: BF16_Optimizer reads the gradients of the whole stage, and misses broken ones
  as above. A rank reads its own shard, so that the others need not be summed on it.

In `models/pipeline/`:
- `gradients.py`: gradients are copied into buckets that are reduced after the last backward pass,
  and BF16_Optimizer zeroes all of them after each step. They are added to one tensor per optimizer
  group, reduced to their owners during the last backward pass, and never zeroed.
- `engine.py`: a fixed schedule with blocking sends and receives. Any order of passes.

Elsewhere:
- `engine.py`, `import_muon`: asking whether an optimizer is Muon imports torch's compiler, for most
  of a second. It is not imported.
- `processes.py`: a JIT build of `deepspeed_shm_comm` takes 30 to 74 s on CPUs. Left out.

Upstream changes that would make these needless: options for the timers, the norm and the copies, an
argument of `initialize` for the engine's class, and lazy imports.
"""

import deepspeed
from deepspeed.utils.timer import NoopTimer


def replace_timers(engine: deepspeed.DeepSpeedEngine) -> None:
    """Give an engine timers that do nothing, unless the JSON asks for times."""
    if not (engine.wall_clock_breakdown() or engine.flops_profiler_enabled()):
        engine.timers = NoopTimer()
