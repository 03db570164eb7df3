"""What a run reports: metrics, events, Weights & Biases, profiles."""
