"""Proof that a recipe has the same loss in every layout."""
