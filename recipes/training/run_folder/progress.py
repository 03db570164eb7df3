"""The progress of a run in steps and samples, because a resumed run may have another batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The steps that a run has done and the samples that it has read."""

    step: int = 0
    samples: int = 0

    def samples_after(self, step: int, global_sequences: int) -> int:
        """The run's samples up to a later step, each from here on reading a global batch."""
        return self.samples + (step - self.step) * global_sequences
