"""Parts of jobs/evaluate.py: configuration and plan, the measuring actor, and the result."""
