"""Reports of a run: metrics, events, Weights & Biases, profiles."""
