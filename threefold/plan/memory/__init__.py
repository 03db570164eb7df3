"""Predicted memory, in bytes per rank."""
