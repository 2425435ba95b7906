"""Numerical solvers: arrays in, arrays out, batched, on any device; they know nothing of learning."""
