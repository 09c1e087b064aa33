"""Parts of jobs/train.py: its configuration, the sweeps it reads, and the record."""
