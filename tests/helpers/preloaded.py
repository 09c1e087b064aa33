"""MLflow, imported as in jobs: with the environment of `jobs.common.registry`, which it reads at import."""

from jobs.common.registry import _clear_errors

with _clear_errors("MLflow"):
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
