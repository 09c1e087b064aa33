"""Experiments: each file builds the configurations of a pair and calls the jobs in order."""
