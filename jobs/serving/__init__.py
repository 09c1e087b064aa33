"""Parts of jobs/serve.py."""
