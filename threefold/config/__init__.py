"""The recipe: its keys, its checks, its phases, and the sizes of the parallel axes."""
