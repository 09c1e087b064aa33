"""Tokens: the batched engine, the keyed sampler, text as it comes."""
