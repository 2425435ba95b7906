"""Everything that is fast: fused modules, recorded steps, chunks of points, pinned copies."""
