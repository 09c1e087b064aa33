"""Drafts: their interface, DFlash and EAGLE-3 behind it, checkpoint formats."""
