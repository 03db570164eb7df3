"""Tensor parallelism: split layers, their collectives, and the loss of a split vocabulary."""
