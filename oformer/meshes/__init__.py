"""Where functions live: grids, triangle meshes of shapes and around airfoils, subsets of points."""
