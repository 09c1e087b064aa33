"""Constraints in the server: tool calls as grammars, and their trial compilation in a separate process."""
