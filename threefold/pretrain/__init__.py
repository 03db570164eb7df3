"""What happens around the training steps of a run."""
