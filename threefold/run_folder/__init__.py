"""The folder of a run: its lock, its lines of metrics and events, and their history."""
