"""Pipeline schedules with layers that sleep or compute, compared with their simulation."""
