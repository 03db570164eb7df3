"""Mixture of experts: routing, dispatch to other ranks, and the balance of the load."""
