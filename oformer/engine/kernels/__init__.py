"""Kernels in Triton and Gluon. Nothing here is imported where Triton is missing."""
