"""Checkpoints in the memory of two nodes."""
