"""Context parallelism: the division of a sequence over ranks, and attention across them."""
