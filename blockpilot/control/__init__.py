"""Step cost, acceptance model, and the controller, which chooses drafts and nodes for the most tokens per second."""
