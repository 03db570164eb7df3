"""Watch over a run: its progress, its numbers, and its ranks."""
