"""Pipeline schedules, and an engine on top of DeepSpeed that runs any of them."""
