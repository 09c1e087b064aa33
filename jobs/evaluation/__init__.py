"""Parts of jobs/evaluate.py."""
