"""Meshes in the formats of VTK, read and written without VTK: `.vtu`, `.vtp`, `.vti`, `.vtk` and their relatives."""
