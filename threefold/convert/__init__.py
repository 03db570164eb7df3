"""Checkpoints to and from transformers, averaged, or in another layout."""
