"""The commands of recipes/: options, and what each of them does in order."""
