"""Benchmarks that anybody can run."""
