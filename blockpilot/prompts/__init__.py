"""Prompts: named sets, and files in many formats."""
