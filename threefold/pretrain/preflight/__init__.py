"""Measurement of devices and links before the first step."""
