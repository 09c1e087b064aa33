"""Constraints in the server: tool calls as grammars, and their trial in a process of its own."""
