"""What jobs share: configuration, cluster, registry, figures."""
