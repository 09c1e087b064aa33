"""Products, layers and ranking in C: they decide the speed of a step on a CPU. Elsewhere torch does the same."""
