"""What every block size would have brought on a prompt: sweeps, replay, Parquet rows."""
