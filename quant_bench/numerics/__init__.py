"""Pure tensor functions: integer grids, streaming moments."""
