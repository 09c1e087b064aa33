"""Evaluation: step costs, interleaved runs, statistics, baselines, oracle bounds."""
