"""Checkpoints, supervision and tracking of a run."""

from typing import Annotated, Literal

from pydantic import Field

from threefold.config.section import Count, NonNegative, Section, Switch


class Checkpoint(Section):
    """The checkpoints that are written, and those that are kept."""

    every: Count
    """Steps between checkpoints. The last step is always saved."""

    keep: Count = 2
    """Newest checkpoints that are kept. Two, so that a damaged one has a predecessor."""

    keep_every: NonNegative = 0
    """Also keep the checkpoint of every step that is a multiple of this number; 0: keep no more."""

    keep_best: NonNegative = 0
    """Also keep this many checkpoints with the lowest validation loss, the mean over all validation
    sets. Only checkpoints saved right after a validation are compared, so `every` must be a
    multiple of `training.evaluate_every`."""

    also_at: Annotated[tuple[Count, ...], Field(examples=[(1, 2, 4, 8, 16)])] = ()
    """More steps after which a checkpoint is saved, such as `[1, 2, 4, 8, 16]`. These checkpoints
    are always kept. Steps after `training.steps` have no effect."""

    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a save that fails, for example because the disk is full: "continue" warns and
    tries again at the next save, "stop" ends the run."""

    room_seconds: NonNegative = 1800
    """Seconds that the save after the last step waits for room on a full disk, before the run ends
    without this checkpoint; 0: do not wait."""

    snapshot_every: NonNegative = 0
    """Steps between snapshots in the memory of the nodes, each file on two nodes, from which
    `launch.py` restarts the run after a failure; 0: none. `plan.py` predicts their cost and the
    best interval. Without `launch.py`, the key has no effect."""

    snapshot_folder: Annotated[str, Field(min_length=1)] = "/dev/shm"
    """Folder for snapshots, in the memory of each node. Snapshots take 24 bytes per parameter,
    divided by the number of nodes and multiplied by two, because the next snapshot is written
    before the last one is deleted."""

    def is_save_due(self, step: int, last: int) -> bool:
        """Return True if a checkpoint is due after a step of a run with `last` steps."""
        return step % self.every == 0 or step in self.also_at or step == last

    def is_always_kept(self, step: int) -> bool:
        """Return True if the checkpoint of a step is kept until the end of the run."""
        return step in self.also_at or (self.keep_every > 0 and step % self.keep_every == 0)


class Supervision(Section):
    """Limits for hangs, bad steps and slow ranks."""

    hang_seconds: NonNegative = 300
    """End the run after this many seconds without progress in training; 0: never. On GPUs,
    collectives of subgroups time out after 600 seconds in any case."""

    startup_seconds: NonNegative = 1800
    """End the run if it makes no progress for this many seconds before the first step (with
    compiled kernels, until the end of that step); 0: never. The time covers building the model,
    loading a checkpoint and compiling."""

    node_seconds: Count = 10
    """Seconds without a sign of life after which `launch.py` counts a node as lost."""

    bad_steps: Count = 3
    """Successive steps with a loss or gradient norm that is not finite after which the run rolls
    back to the last checkpoint. A single such step is skipped."""

    loss_spike: Annotated[float, Field(ge=0)] = 3.0
    """Nats per token above the median of the recent losses at which the run rolls back; 0: never.
    The default is far beyond the usual noise."""

    rollbacks: NonNegative = 2
    """Rollbacks without a new checkpoint in between after which the run stops instead; 0: never
    roll back, stop at once."""

    compare_speed_every: NonNegative = 100
    """Steps between comparisons of the ranks' speeds; 0: never."""

    slow_rank: Annotated[float, Field(gt=1)] = 1.5
    """Ratio of a rank's time in forward passes to that of the other ranks of its stage above which
    it is reported as slow."""

    preflight: Switch = "auto"
    """Measure and check the devices and links before the first step of every start, which takes a
    few seconds. "auto" does so on GPUs."""

    preflight_ratio: Annotated[float, Field(gt=1)] = 1.5
    """Ratio of the median of the other ranks to a rank's measured rate above which the preflight
    names it as slow."""

    slow_comparisons: Count = 3
    """Successive comparisons in which a rank is slow after which its node counts as slow, and
    `cluster.on_slow_rank` applies."""

    @property
    def patience_seconds(self) -> int | None:
        """Seconds that a rank may wait before supervision ends the run; None if unlimited."""
        limits = self.hang_seconds, self.startup_seconds
        return max(limits) if all(limits) else None


class Tracking(Section):
    """Weights & Biases, and the timeline and profile of measured steps."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "threefold"
    """Weights & Biases project of the run."""

    team: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,128}$")] = ""
    """Weights & Biases team, or user, that owns the run; "": the default of your account."""

    group: Annotated[str, Field(max_length=128)] = ""
    """Weights & Biases group of the run, such as runs that differ only in the seed; "": none.
    `sweep.py` sets the group of its runs itself."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of Weights & Biases. "auto" is online if an API key is found and offline otherwise. The
    metrics are always in the run folder too."""

    tags: tuple[str, ...] = ()
    """Tags of the run in Weights & Biases."""

    artifacts: bool = False
    """Record each checkpoint in Weights & Biases as an artifact that refers to its folder. Its
    files are not uploaded."""

    timeline_step: NonNegative = 0
    """First step whose instructions are recorded on every rank, with their times; 0: record
    nothing. Needs ZeRO-1. Recorded steps are somewhat slower."""

    timeline_steps: Count = 3
    """Number of steps that are recorded from `timeline_step` on."""

    profile_step: NonNegative = 0
    """Step that torch.profiler records on `profile_ranks`; 0: none. It takes longer than others."""

    profile_ranks: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = (0,)
    """Ranks of the profile. Ranks that the run does not have are ignored."""

    memory_snapshot: bool = False
    """Record allocations on GPUs, and save them into the run folder if memory runs out."""
