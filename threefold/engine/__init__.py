"""The model, its optimizer and the engine of a rank, on top of DeepSpeed."""
