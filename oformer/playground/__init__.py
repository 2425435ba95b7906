"""Trained operators over HTTP, and a page to play with them (docs/serving.md)."""
