"""MLflow store: runs, registered policies and the alias `champion`. The only module that imports mlflow.

The store is MLFLOW_TRACKING_URI, or `mlflow.db` with `mlartifacts/` in the working directory. Processes that create a
new sqlite store at the same time corrupt it, so `Registry.open` takes a file lock for the first access. Policies are
registered as the plain files of `save_policy`; nothing is pickled or unpickled.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from blockpilot.pairs.table import target_slug
from blockpilot.storage import first_line, without_secrets
from jobs.common.config import in_submitted_job

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

EXPERIMENT = "blockpilot"
CHAMPION = "champion"
AUTO = "auto"  # the champion, or the untrained choice while there is none
UNTRAINED = "untrained"  # the acceptance model without training, which is never registered
_SQLITE = "sqlite:///"
_TABLES_TAG = "mlflow.loggedArtifacts"
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "GIT_PYTHON_REFRESH": "quiet",
}


def model_name(target: str) -> str:
    """Name of the registered model of a target's policies: 'Qwen/Qwen3-4B' -> 'blockpilot-qwen3-4b'."""
    return f"blockpilot-{target_slug(target)}"


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI, otherwise sqlite in the working directory; sqlite paths are made absolute.

    Raises ValueError for a relative path in a submitted job, whose working directory is a temporary copy.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"{_SQLITE}mlflow.db"
    if not uri.startswith(_SQLITE):
        return uri
    path = Path(uri.removeprefix(_SQLITE))
    if in_submitted_job() and not path.is_absolute():
        raise ValueError(
            f"MLflow store {uri}: the directory of a submitted job is temporary; "
            "set MLFLOW_TRACKING_URI to an absolute sqlite path or a server"
        )
    return f"{_SQLITE}{path.absolute()}"


def is_missing(uri: str) -> bool:
    """True for a sqlite store that does not exist yet: nothing is registered there, and a connection creates it."""
    return uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).exists()


@dataclass(frozen=True)
class HeldOut:
    """Results of jobs/evaluate.py on held-out prompts, stored as the version's tags `heldout.<field>`."""

    policy_tau: float
    best_fixed_tau: float
    policy_speed: float
    """Tokens per second."""
    best_fixed_speed: float
    speed_ratio_low: float
    """95% interval over prompts of policy_speed / best_fixed_speed."""
    speed_ratio_high: float
    num_prompts: float = 0
    """Number of held-out prompts."""
    champion: float = 0
    """Version number of the champion measured in the same runs; 0 for none."""
    champion_ratio: float = 0.0
    """policy_speed over the champion's, with its 95% interval."""
    champion_ratio_low: float = 0.0
    champion_ratio_high: float = 0.0
    untrained_ratio: float = 0.0
    """policy_speed over the untrained choice's, with its 95% interval; 0 if that was not measured."""
    untrained_ratio_low: float = 0.0
    untrained_ratio_high: float = 0.0

    @property
    def has_untrained(self) -> bool:
        """True if the untrained choice was measured in the same runs."""
        return self.untrained_ratio != 0


class Version(NamedTuple):
    """A version of a registered policy."""

    name: str
    number: int
    run_id: str | None
    tags: dict[str, str]

    @property
    def held_out(self) -> HeldOut | None:
        """The held-out results; None until jobs/evaluate.py has logged all of them."""
        tags = {f.name: f"heldout.{f.name}" for f in fields(HeldOut)}
        if not self.tags.keys() >= set(tags.values()):
            return None
        return HeldOut(**{name: float(self.tags[tag]) for name, tag in tags.items()})


class RunRecord:
    """Writer to one MLflow run."""

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.id = run_id
        self._client = client

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log settings of the run, without secrets; a continued run keeps its first values."""
        from mlflow.entities import Param

        logged = self._client.get_run(self.id).data.params
        new = [Param(k, without_secrets(str(v))) for k, v in params.items() if k not in logged]
        self._client.log_batch(self.id, params=new)

    def log_tags(self, tags: Mapping[str, object]) -> None:
        for key, value in tags.items():
            self._client.set_tag(self.id, key, value)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(k, float(v), now_ms, step) for k, v in metrics.items()])

    def last_step(self, metric: str) -> int:
        """Last logged step of `metric`; -1 before the first."""
        return max((m.step for m in self._client.get_metric_history(self.id, metric)), default=-1)

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Copy a file, or the contents of a directory, into the run's artifacts."""
        log = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
        log(self.id, str(path), folder)

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Log at least one row, all with the same keys, as a table in the MLflow UI; `name` ends in .json."""
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        self._client.log_dict(self.id, {"columns": columns, "data": data}, name)
        logged = self._client.get_run(self.id).data.tags.get(_TABLES_TAG, "[]")
        tables = [*json.loads(logged), {"path": name, "type": "table"}]
        self._client.set_tag(self.id, _TABLES_TAG, json.dumps(tables))


class Registry:
    """Connection to an MLflow store. Raises ValueError if a name, a version or the store does not exist."""

    def __init__(self, uri: str, client: "MlflowClient") -> None:
        self.uri = uri
        self._client = client

    @staticmethod
    def open(uri: str | None = None) -> "Registry":
        """Connect; creates a new sqlite store under a lock. Other processes connect by `registry.uri`."""
        uri = uri or tracking_uri()
        if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).parent.is_dir():
            raise ValueError(f"MLflow store {uri}: no such directory")
        lock = FileLock(uri.removeprefix(_SQLITE) + ".lock") if uri.startswith(_SQLITE) else nullcontext()
        with lock, _clear_errors(f"MLflow store {uri}"):
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
        return Registry(uri, client)

    # --- runs ---

    @contextmanager
    def log_run(self, name: str, *, run_id: str | None = None, experiment: str = EXPERIMENT) -> Iterator[RunRecord]:
        """Record a new run, or continue `run_id`; its status ends as FINISHED, or FAILED after an exception."""
        if run_id is None:
            run_id = self._client.create_run(self._experiment_id(experiment), run_name=name).info.run_id
        else:
            with _clear_errors(f"run {run_id} in {self.uri}"):
                self._client.update_run(run_id, status="RUNNING")
        try:
            yield RunRecord(self._client, run_id)
        except BaseException:
            self._client.set_terminated(run_id, "FAILED")
            raise
        self._client.set_terminated(run_id, "FINISHED")

    def run(self, run_id: str) -> RunRecord:
        """Writer to an existing run, from another process; does not change the run's status."""
        with _clear_errors(f"run {run_id} in {self.uri}"):
            self._client.get_run(run_id)
        return RunRecord(self._client, run_id)

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            location = None
            if self.uri.startswith(_SQLITE):  # otherwise relative to the directory of the first process
                location = (Path(self.uri.removeprefix(_SQLITE)).parent / "mlartifacts").as_uri()
            try:
                return self._client.create_experiment(name, artifact_location=location)
            except MlflowException:
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:  # no other process has created it
                    raise
        return str(experiment.experiment_id)

    # --- policies ---

    def register_policy(
        self,
        directory: str | Path,
        *,
        target: str,
        run_id: str,
        tags: Mapping[str, object],
        files: Sequence[str] | None = None,
    ) -> Version:
        """Register a policy's directory, or only those of its `files` that exist, as the next version of the
        target's model.
        """
        from mlflow.exceptions import MlflowException

        name, client = model_name(target), self._client
        text_tags = {key: str(value) for key, value in tags.items()}
        experiment = client.get_run(run_id).info.experiment_id
        model = client.create_logged_model(experiment, name="policy", source_run_id=run_id, model_type="safetensors")
        if files is None:
            client.log_model_artifacts(model.model_id, str(directory))
        for path in (Path(directory) / name for name in files or ()):
            if path.exists():
                client.log_model_artifact(model.model_id, str(path))
        client.finalize_logged_model(model.model_id, "READY")
        try:
            client.create_registered_model(name, tags={"target": target})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model.model_id}"
        return _version(client.create_model_version(name, source, run_id, text_tags, model_id=model.model_id))

    def versions(self, name: str) -> list[Version]:
        """All versions of a model, oldest first; ValueError if there is no such model."""
        with _clear_errors(f"registered model {name!r} in {self.uri}"):
            self._client.get_registered_model(name)
        model_versions = self._client.search_model_versions(f"name = '{name}'")
        return sorted(map(_version, model_versions), key=lambda version: version.number)

    def has_model(self, name: str) -> bool:
        """True if a model of this name is registered."""
        with _clear_errors(f"MLflow store {self.uri}"):
            return bool(self._client.search_registered_models(f"name = '{name}'", max_results=1))

    def newest(self, name: str) -> Version:
        """The last version; ValueError if there is no such model, or no version of it."""
        if versions := self.versions(name):
            return versions[-1]
        raise ValueError(without_secrets(f"registered model {name!r} in {self.uri}: has no versions"))

    def version(self, name: str, number: int) -> Version:
        with _clear_errors(f"version {number} of {name!r} in {self.uri}"):
            return _version(self._client.get_model_version(name, str(number)))

    def tag_version(self, version: Version, tags: Mapping[str, object]) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(version.name, str(version.number), key, str(value))

    def log_held_out(self, version: Version, figures: HeldOut) -> None:
        """Tag a version with its held-out results, which jobs/promote.py reads.

        The number of prompts is 0 until all tags are written: a killed evaluation leaves results that do not count.
        """
        tags = {f"heldout.{name}": value for name, value in asdict(figures).items()}
        num_prompts = {"heldout.num_prompts": tags.pop("heldout.num_prompts")}
        for part in ({"heldout.num_prompts": 0.0}, tags, num_prompts):
            self.tag_version(version, part)

    def set_champion(self, version: Version) -> None:
        """Point `@champion` at the version."""
        self._client.set_registered_model_alias(version.name, CHAMPION, str(version.number))

    def champion(self, name: str) -> Version:
        """The version behind `@champion`; ValueError if the model or its champion does not exist."""
        with _clear_errors(f"'{name}@{CHAMPION}' in {self.uri}"):
            return _version(self._client.get_model_version_by_alias(name, CHAMPION))

    def find_champion(self, name: str) -> Version | None:
        """The champion; None if the model exists but has none yet."""
        with _clear_errors(f"registered model {name!r} in {self.uri}"):
            aliases = self._client.get_registered_model(name).aliases
        return self.champion(name) if CHAMPION in aliases else None

    def download(self, version: Version, directory: str | Path) -> Path:
        """Copy a version's files to `directory`, which is replaced if it exists, for `load_policy`."""
        import mlflow

        folder = Path(directory).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as partial:
            with _clear_errors(f"version {version.number} of {version.name!r} in {self.uri}"):
                downloaded = mlflow.artifacts.download_artifacts(
                    artifact_uri=self._address(version), dst_path=partial, tracking_uri=self.uri
                )
            shutil.rmtree(folder, ignore_errors=True)
            Path(downloaded).rename(folder)
        return folder

    def _address(self, version: Version) -> str:
        """URI of a version's files. MLflow would resolve "models:/" in its global registry, not in this one."""
        source = str(self._client.get_model_version(version.name, str(version.number)).source)
        if not source.startswith("models:/"):
            return source
        location: str = self._client.get_logged_model(source.removeprefix("models:/")).artifact_location
        return location


def _version(version: "ModelVersion") -> Version:
    return Version(version.name, int(version.version), version.run_id, dict(version.tags))


@contextmanager
def kept_for_later(uri: str, output: Path) -> Iterator[None]:
    """Convert errors while logging a finished result to a ValueError that explains how to log it later."""
    try:
        with _clear_errors(f"MLflow store {uri}"):
            yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}. The results are in {output}; --relog logs them later") from error


@contextmanager
def _clear_errors(what: str) -> Iterator[None]:
    """Convert MLflow's errors to one-line ValueErrors that begin with `what`."""
    for name, value in _QUIET.items():  # before MLflow is imported; the user's settings take precedence
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError) as error:
        raise ValueError(without_secrets(f"{what}: {first_line(error)}")) from None
