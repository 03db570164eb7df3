"""The network: pure torch, and DeepSpeed's LayerSpec."""
