"""Predicted time, in seconds."""
