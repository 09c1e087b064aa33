"""Parts of jobs/train.py: its configuration, the sweeps it reads, the plan of a fit, and the record."""
