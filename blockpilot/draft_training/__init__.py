"""Training a draft: answers of the target, its features of them, loss and loop."""
