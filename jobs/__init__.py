"""One stage of the pipeline per file; each runs by `python jobs/X.py` and by `ray job submit`."""
