"""Shared by jobs: configuration, cluster, registry, figures."""
