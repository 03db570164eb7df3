"""One training step of this code and of others: time, memory and overhead."""
