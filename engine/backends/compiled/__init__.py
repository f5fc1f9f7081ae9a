"""The compiled products of a CPU, in C, and their tables."""
