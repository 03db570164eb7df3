"""Element-wise operations, norms and attention on one rank, eager or compiled."""
