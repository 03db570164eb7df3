"""Tests; each process computes with one thread, because two of them run at a time."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # must be set before torch is imported
