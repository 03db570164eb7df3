"""The library behind the commands of recipes/; docs/architecture.md describes each package."""
