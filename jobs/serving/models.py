"""Models of a server: configuration, names and policy of each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from blockpilot.pairs.table import no_draft_message, split_revision, target_slug
from blockpilot.types import MAX_BLOCK_SIZE
from jobs.common.config import Config, PairConfig, Placement
from jobs.common.registry import AUTO, CHAMPION, UNTRAINED, Registry, model_name
from jobs.serving.champions import copy_of


class ReplicaResources(Placement):
    """Resources of each replica of a model."""

    num_cpus: float | None = Field(default=None, gt=0)
    """CPU cores of each replica, and its torch threads (at least one). By default the replicas of all models share
    the cores of the machine if this command starts Ray; in a cluster each has one core."""


class ModelConfig(Config):
    """One model to serve: its pair, policy, replicas and limits."""

    pair: PairConfig = PairConfig()
    served_model_name: tuple[str, ...] = ()
    """Names of the model in requests; responses and /v1/models use the first. By default the target's hub id and its
    last part in lower case: Qwen/Qwen3-4B and qwen3-4b."""
    policy: str = AUTO
    """Policy that chooses what is drafted and verified: "champion" (of the registry), the directory of a policy,
    "untrained" (an acceptance model that starts with the draft's probabilities), or a fixed block size. "auto" is the
    champion, or "untrained" while there is none. Without a draft: only "auto", "untrained" or block size 1."""
    resources: ReplicaResources = ReplicaResources()
    """Resources of each replica; num_actors is the number of replicas, or the minimum if max_replicas is larger."""
    max_replicas: int = Field(default=1, ge=1)
    """Maximum number of replicas. If it exceeds num_actors of `resources`, autoscaling adds replicas, and drains and
    stops idle ones."""
    first_token_s: float = Field(default=2.0, gt=0)
    """Seconds that a request may wait for its first token before autoscaling adds a replica. It also adds replicas if
    requests outnumber rows."""
    routing: Literal["prefix", "least-loaded"] = "prefix"
    """Choice of a request's replica. prefix: the same replica for conversations with the same beginning or
    `prompt_cache_key`, while it has a free row. least-loaded: the less loaded of two random replicas."""
    num_slots: int = Field(default=8, ge=1)
    """Requests that a replica decodes together (slots of its cache)."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and answer together; by default 2048, or the target's context if that is shorter."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer; by default limited only by the context."""
    max_prefill_tokens: int = Field(default=256, ge=1)
    """Maximum prompt tokens in one step (chunked prefill): other requests continue between the chunks of a longer
    prompt. A smaller number shortens the gaps between tokens and costs throughput (LOG.md)."""
    prefix_tokens: int | None = Field(default=None, ge=0)
    """Size of the prefix cache in tokens, with LRU eviction; by default as many as the slots hold, 0 for no cache."""
    max_queue: int = Field(default=64, ge=0)
    """Maximum requests that wait at a replica for a slot; further ones are answered 429."""

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not name.strip() or names.count(name) > 1:
                raise ValueError(f"{'empty' if not name.strip() else 'repeated'} name {name!r}")
        return names

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in requests, the main name first."""
        target, _ = split_revision(self.pair.models[0])
        return self.served_model_name or tuple(dict.fromkeys((target, target_slug(target))))

    @property
    def most_replicas(self) -> int:
        """Maximum number of replicas, with and without autoscaling."""
        return max(self.resources.num_actors, self.max_replicas)

    @property
    def capacity(self) -> int:
        """Maximum number of requests in all replicas."""
        return self.most_replicas * (self.num_slots + self.max_queue)

    @property
    def policy_source(self) -> int | str:
        """A block size, "auto", "champion", "untrained", or the absolute directory of a policy."""
        if self.policy.isdecimal():
            return int(self.policy)
        return self.policy if self.policy in (AUTO, CHAMPION, UNTRAINED) else str(Path(self.policy).absolute())


def check_without_draft(target: str, policy: int | str | Path) -> None:
    """Raise ValueError unless a target without a draft can have this policy: 1, "auto" or "untrained"."""
    if policy not in (0, 1, AUTO, UNTRAINED):
        raise ValueError(no_draft_message(target, f"policy {policy}"))


def models_by_name(models: Sequence[ModelConfig]) -> dict[str, str]:
    """Main name of a model by each of its names; raises ValueError if two models share a name."""
    main_names = dict[str, str]()
    for model in models:
        if repeated := main_names.keys() & set(model.names):
            raise ValueError(f"name {min(repeated)!r} of two models: set served_model_name")
        main_names |= dict.fromkeys(model.names, model.names[0])
    return main_names


def find_policy(model: ModelConfig, folder: Path) -> int | str | Path:
    """Resolve a policy: a block size, "untrained", a directory, or "auto" if there is no champion or no draft.

    Raises ValueError if there is no such policy or it is for other models.
    """
    source = model.policy_source
    if not model.pair.has_draft:
        check_without_draft(model.pair.models[0], source)
    if source == UNTRAINED:
        return source
    if isinstance(source, int):
        if not 1 <= source <= MAX_BLOCK_SIZE:
            raise ValueError(f"policy {source}: a block size must be 1 to {MAX_BLOCK_SIZE}")
        return source
    from blockpilot.policy.store import load_policy  # seconds to import

    directory = Path(source)
    if source == AUTO and not model.pair.has_draft:
        return AUTO
    if source in (AUTO, CHAMPION):
        registry = Registry.open()
        try:
            version = registry.champion(model_name(model.pair.models[0]))
        except ValueError as error:
            if source == AUTO:
                return AUTO
            raise ValueError(
                f"{error}. Create one with jobs/sweep.py, jobs/train.py and jobs/promote.py,"
                " or serve without any with --policy untrained"
            ) from None
        directory = copy_of(registry, version, folder)
    info = load_policy(directory).info
    model.pair.check_made_for(f"policy {directory}", info.pair)
    return directory
