"""Learned policies: networks and priors, what they learn from, training, files, and what look-ups say of them."""
