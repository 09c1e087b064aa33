"""Products, layers and ranking in C, which determine the step time on a CPU. Elsewhere torch computes the same."""
