"""How far a run has come, in steps and in samples: a resumed run may have another batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a run starts or goes on: after so many steps, which read so many samples."""

    step: int = 0
    samples: int = 0

    def samples_after(self, step: int, global_sequences: int) -> int:
        """The run's samples up to a later step, each from here on reading a global batch."""
        return self.samples + (step - self.step) * global_sequences
