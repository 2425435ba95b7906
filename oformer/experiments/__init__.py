"""The named experiments, and the published numbers that they repeat."""
