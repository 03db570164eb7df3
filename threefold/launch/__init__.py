"""Runs on several nodes, which continue when nodes fail."""
