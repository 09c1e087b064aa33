"""Chances, learned: network, dataset, training, files, and what look-ups say of a policy."""
