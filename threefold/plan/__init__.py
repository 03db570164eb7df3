"""The planner: predicted memory, time and layouts."""
