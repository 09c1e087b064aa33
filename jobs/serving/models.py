"""Models of a server: what each one's configuration says, its names, and its policy."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator

from blockpilot.pairs.table import no_draft_message, split_revision, target_slug
from blockpilot.types import MAX_BLOCK_SIZE
from jobs.common.config import Config, PairConfig, Placement
from jobs.common.registry import AUTO, CHAMPION, UNTRAINED, Registry, model_name
from jobs.serving.champions import copy_of


class ReplicaResources(Placement):
    """Resources that each replica of a model holds."""

    num_cpus: float | None = Field(default=None, gt=0)
    """CPU cores of a replica; also its torch threads (at least one). By default the replicas of all models share the
    cores of the machine where this command starts Ray; in a cluster each has one."""


class ModelConfig(Config):
    """One model to serve: its pair, policy, replicas and limits."""

    pair: PairConfig = PairConfig()
    served_model_name: tuple[str, ...] = ()
    """Names under which the model answers, and no others; responses and /v1/models say the first. By default the
    target's own and its last part in small letters: Qwen/Qwen3-4B and qwen3-4b."""
    policy: str = AUTO
    """Choice of what is drafted and verified: by "champion" of the registry, by the directory of a policy, by
    "untrained" (an acceptance model that starts with the draft's own probabilities), or one block size. "auto" is the
    champion, and "untrained" while there is none. A target without a draft has "untrained", or block size 1."""
    resources: ReplicaResources = ReplicaResources()
    """Resources of each replica; num_actors is their number, or the least number where max_replicas is larger."""
    max_replicas: int = Field(default=1, ge=1)
    """Upper bound of autoscaling; an idle replica is drained and stopped."""
    num_slots: int = Field(default=8, ge=1)
    """Requests that a replica decodes together."""
    max_length: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; by default 2048, or the target's context if that is shorter."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Limit of an answer's tokens; by default only the context limits it."""
    max_prefill_tokens: int = Field(default=256, ge=1)
    """Prompt tokens in one step; a longer prompt takes several steps, and streams go on in between. A smaller number
    shortens the gaps between tokens and costs throughput (LOG.md)."""
    prefix_tokens: int | None = Field(default=None, ge=0)
    """Tokens whose keys and values are kept for prompts that begin alike, the least recently used replaced first; by
    default as many as the slots hold, 0 for none."""
    max_queue: int = Field(default=64, ge=0)
    """Requests that wait at a replica for a slot; more are answered 429."""

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not name.strip() or names.count(name) > 1:
                raise ValueError(f"{'empty' if not name.strip() else 'repeated'} name {name!r}")
        return names

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which the model answers; the first is its own."""
        target, _ = split_revision(self.pair.models[0])
        return self.served_model_name or tuple(dict.fromkeys((target, target_slug(target))))

    @property
    def policy_source(self) -> int | str:
        """A block size, "auto", "champion", "untrained", or the absolute directory of a policy."""
        if self.policy.isdecimal():
            return int(self.policy)
        return self.policy if self.policy in (AUTO, CHAMPION, UNTRAINED) else str(Path(self.policy).absolute())


def check_without_draft(target: str, policy: int | str | Path) -> None:
    """Raise ValueError for a policy that a target without a draft cannot have: all but 1, "auto" and "untrained"."""
    if policy not in (0, 1, AUTO, UNTRAINED):
        raise ValueError(no_draft_message(target, f"policy {policy}"))


def models_by_name(models: Sequence[ModelConfig]) -> dict[str, str]:
    """Every name, and the first one of its model; ValueError for a name of two models."""
    found = dict[str, str]()
    for model in models:
        if taken := found.keys() & set(model.names):
            raise ValueError(f"name {min(taken)!r} of two models: served_model_name gives each names of its own")
        found |= dict.fromkeys(model.names, model.names[0])
    return found


def find_policy(model: ModelConfig, folder: Path) -> int | str | Path:
    """A block size, "auto" where it is no champion, "untrained", or a policy's directory; ValueError if there is none
    or it is for other models.
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
                f"{error}. Make one with jobs/sweep.py, jobs/train.py and jobs/promote.py,"
                " or serve without any with --policy untrained"
            ) from None
        directory = copy_of(registry, version, folder)
    info = load_policy(directory).info
    model.pair.check_made_for(f"policy {directory}", info.pair)
    return directory
