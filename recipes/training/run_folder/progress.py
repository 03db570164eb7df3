"""The progress of a run in steps and samples; both are needed if the batch size changes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The number of steps that a run has completed and of samples that it has read."""

    step: int = 0
    samples: int = 0

    def samples_after(self, step: int, global_sequences: int) -> int:
        """Return the samples read up to a later step, at `global_sequences` samples per step."""
        return self.samples + (step - self.step) * global_sequences
