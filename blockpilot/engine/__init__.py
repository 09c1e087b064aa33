"""Batched engine, keyed sampler, constrained decoding and incremental detokenizer."""
