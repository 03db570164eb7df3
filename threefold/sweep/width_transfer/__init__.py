"""Learning rates and activations over widths."""
