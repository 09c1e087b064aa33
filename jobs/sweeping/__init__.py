"""Parts of jobs/sweep.py."""
