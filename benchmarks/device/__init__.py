"""The datasheet of a device, fitted to its measured matmuls, attention and memory."""
