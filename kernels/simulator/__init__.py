"""A device made of this process's memory, on which the kernels' Triton source runs as NumPy."""
