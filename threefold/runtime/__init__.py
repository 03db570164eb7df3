"""Processes: how they start, communicate, print and end."""
