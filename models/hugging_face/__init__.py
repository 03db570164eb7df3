"""Architectures and weights of transformers' model families."""
