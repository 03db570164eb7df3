"""One rank of a full-size job on fake tensors: its memory and its messages, counted."""
