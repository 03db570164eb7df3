"""The parts of a run around its training steps: experiment, start, evaluation, saves, rollbacks."""
