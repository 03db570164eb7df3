"""Runs as one page of HTML."""
