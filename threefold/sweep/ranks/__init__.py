"""Ranks that measure one trial after the other."""
