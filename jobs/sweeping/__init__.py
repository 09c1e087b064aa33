"""Parts of jobs/sweep.py: output folder, scheduling, report, and sweeps by vLLM."""
