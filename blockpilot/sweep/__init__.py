"""Sweeps: tau of every block size on each prompt, by replay, as Parquet rows and their summary."""
