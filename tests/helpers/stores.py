"""An MLflow store that several processes create concurrently."""

CREATE = """
import sys
from jobs.common.registry import Registry
with Registry.open(sys.argv[1]).log_run("run", experiment="create") as run:
    run.log_metrics({"x": 1.0})
"""
NUM_CREATORS = 2
