"""Checkpoints: saved in the background, verified before they are trusted, read in any layout."""
