"""Layers. They import torch and nothing of ours but the error type, so that they can be copied into another project."""
