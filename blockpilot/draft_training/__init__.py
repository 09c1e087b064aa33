"""Training of a draft: the target's answers and features, loss and training loop."""
