"""Where functions live: grids now, meshes of irregular domains to come."""
