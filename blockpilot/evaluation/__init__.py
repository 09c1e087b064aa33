"""Interleaved measurement, intervals over prompts, and the oracle as a bound."""
