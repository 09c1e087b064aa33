"""Grammars that a request's text must match, and the automata that follow it."""
