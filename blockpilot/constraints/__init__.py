"""Grammars of structured outputs, and the automata that follow them."""
