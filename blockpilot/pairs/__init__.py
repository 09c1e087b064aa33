"""A target and its draft: the table of named pairs, and one loader."""
