"""Measurement of a cluster, and the datasheet written from it."""
