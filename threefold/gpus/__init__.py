"""Datasheets of GPUs."""
