"""From a recipe to weights: the loop, and what it is made of."""
