"""What decides the speed of a step on a CPU, in C: products, layers, ranking. Elsewhere torch does the same."""
