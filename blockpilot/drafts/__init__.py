"""What proposes: the interface of drafts, DFlash and EAGLE-3 behind it, their checkpoint formats."""
