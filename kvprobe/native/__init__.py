"""The same at memory speed: what numba compiles, and the programs that it executes."""
