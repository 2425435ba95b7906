"""Layers. They import torch and nothing of ours but the error type and the switch of fused kernels, so that they can be
copied into another project."""
