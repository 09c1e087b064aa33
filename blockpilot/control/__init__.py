"""Price and choice: seconds of a step, and the block sizes that make the most tokens a second."""
