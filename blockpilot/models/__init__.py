"""Device code: the target, its KV cache, packed rows, linear products."""
