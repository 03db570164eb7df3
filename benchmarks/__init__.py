"""Measurements of speed and memory; BENCHMARKS.md has their results."""
