"""Comparison of predictions with measured runs, and a fit to them."""
