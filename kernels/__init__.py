"""Pure functions on arrays: a NumPy body that is the specification, and C that gives the same bits."""
