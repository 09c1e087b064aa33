"""Learned policies: networks and priors, their training examples, training, files, and a look-up diagnostic."""
