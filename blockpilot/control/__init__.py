"""How much to draft: seconds of a step, and the choice that makes the most tokens a second."""
