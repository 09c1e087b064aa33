"""Prompts: named sets and files."""
