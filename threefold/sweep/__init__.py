"""Measurement of layouts, settings, links and widths."""
