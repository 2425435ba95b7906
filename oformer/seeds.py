"""Randomness from keys: the numbers for (seed, index) or (seed, step) are the same whatever came before them."""

import numpy as np
import torch


def numpy_generator(*key: int) -> np.random.Generator:
    """A numpy generator that depends on the key alone."""
    return np.random.default_rng(list(key))


def torch_generator(*key: int) -> torch.Generator:
    """A torch generator, on the CPU, that depends on the key alone."""
    # Its length is part of the key: numpy takes (1, 2) and (1, 2, 0) for the same.
    state = np.random.SeedSequence([len(key), *key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) % 2**63)
