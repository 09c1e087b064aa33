"""The configuration of jobs/evaluate.py and its plan: prompts, groups and policies.

Checks everything that can be checked before Ray starts and a model is loaded.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.policy.dataset import prompt_key
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import Prompt, SetAside, answer_limit, load_prompts, reasons
from blockpilot.storage import is_file, join
from blockpilot.sweep.rows import prompt_ids, read_parts
from blockpilot.sweep.summary import Summary
from blockpilot.types import MAX_BLOCK_SIZE, PairId
from jobs.common.config import Config, PairConfig, Place
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import CHAMPION, UNTRAINED, Registry, Version, model_name

AR, POLICY, RANDOM, MEANS, ORACLE = "AR", "policy", "random", "running means", "oracle (bound)"
CONTROL, STATIC = "AR again", "best static"
VERIFICATION, BUDGET = "adaptive verification", "tree budget"
LOOKUP, SWITCH, NO_LOOKUP = "lookup alone", "lookup or draft", f"{UNTRAINED} without lookup"
METHOD_PREFIX, TREE_PREFIX, WITH_LOOKUP = "B=", "tree ", " with lookup"  # of fixed block sizes, and nodes
NEWEST, NO_POLICY = "newest", "none"
BASELINES = {
    "control": CONTROL,
    "random": RANDOM,
    "means": MEANS,
    "verification": VERIFICATION,
    "budget": BUDGET,
    "untrained": UNTRAINED,
    "lookup": LOOKUP,
    "switch": SWITCH,
    "no-lookup": NO_LOOKUP,
    "oracle": ORACLE,
}
WITHOUT_DRAFT = "control", "untrained"  # baselines that need no draft


def method_name(block_size: int) -> str:
    """Of a fixed block size."""
    return AR if block_size == 1 else f"{METHOD_PREFIX}{block_size}"


class EvaluateConfig(Config):
    """Which methods to measure, on which prompts, and how."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(min_length=1)
    """Prompt sets by name, and files (.jsonl, .parquet, .txt); none that the policy has learned from."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Prompts of each set and file; all of them by default."""
    shuffle_seed: int = 0
    """Draws which prompts of a set come first."""
    policy: str = CHAMPION
    """"champion" or "newest" of the registry, the directory of a policy, or "none": all that a lone target has."""
    rivals: tuple[str, ...] = (CHAMPION,)
    """Policies to measure beside it: directories, and "champion" (left out where there is no other)."""
    baselines: tuple[str, ...] = ("control", "random", "means", "untrained", "oracle")
    """What else to measure; none by `--baselines` alone. control: AR again. means: chains as deep as running means of
    acceptance say (Ollama). verification: one budget for the chains of all rows, by margins of the draft (vLLM).
    budget: a tree for every row by its own price (CaDDTree). untrained: the choice of every step, with no
    training; to be promoted, a policy must beat it. no-lookup: the same without what earlier text suggests. lookup:
    that alone, without the draft (vLLM's ngram), and the fixed trees with it. switch: lookup where the text has a
    match, else the draft (llama.cpp). Of a target without a draft control and untrained (lookup) alone.
    random: a block size for each prompt. oracle: the best one for each prompt, a bound."""
    rival_drafts: tuple[str, ...] = ()
    """Other drafts of the same target, by hub id or local directory, such as EAGLE-3: chains of the fixed block
    sizes up to their own, the fixed trees, and the untrained choice where `untrained` is a baseline."""
    tree_sizes: tuple[int, ...] = ()
    """Fixed draft trees of so many nodes, ascending (DDTree)."""
    block_sizes: tuple[int, ...] | None = None
    """Fixed block sizes, ascending. Default: the candidates of a policy of kind prompt, or quarters of the draft's
    trained one."""
    sweep: tuple[Place, ...] = ()
    """Sweeps whose prompts are refused, besides those that the policies know: the best fixed block size is theirs."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the target's distribution; 1 is all of it."""
    seed: int = Field(default=1, ge=-(2**62), lt=2**62)
    """Seed of the sampler, another than the sweep's; each repeat adds one."""
    max_new_tokens: int = Field(default=128, ge=4)
    """Tokens of an answer at most; where several are decoded together, every prompt has a limit of its own from half
    of this."""
    concurrency: int = Field(default=1, ge=1)
    """Requests decoded together; when one ends, the next one begins."""
    waves: int = Field(default=4, ge=1)
    """Prompts of a group, which share a queue, over the concurrency: the more, the less its end counts."""
    warm_up: int = Field(default=16, ge=0)
    """Prompts that what adapts has decoded before each group: of every second group, for the others. 0 for none."""
    repeats: int = Field(default=1, ge=1)
    """Times that everything is run."""
    output: Path = Path("runs/evaluate")
    """Directory of the result; an absolute path in a submitted job."""
    accelerator_type: str | None = None
    """Run on a GPU of this type. Otherwise a GPU where there are any."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores; also torch threads (at least one)."""
    relog: bool = False
    """Measure nothing: log the finished evaluation in `output` to MLflow."""

    @property
    def baseline_methods(self) -> list[str]:
        """The chosen baselines by the names of their methods; without a draft those that need none."""
        possible = BASELINES if self.pair.has_draft else WITHOUT_DRAFT
        return [method for name, method in BASELINES.items() if name in self.baselines and name in possible]

    @property
    def group_size(self) -> int:
        """Prompts that share a queue."""
        return self.concurrency * self.waves

    def limit(self, prompt: Prompt) -> int:
        """Tokens of a prompt's answer at most."""
        return self.max_new_tokens if self.concurrency == 1 else answer_limit(prompt, self.max_new_tokens)

    @field_validator("block_sizes")
    @classmethod
    def _check_block_sizes(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is not None and (sorted(set(sizes)) != list(sizes) or not sizes or sizes[0] < 2):
            raise ValueError(f"{sizes}: must be ascending and at least 2 (1 is AR, which is always measured)")
        if sizes and sizes[-1] > MAX_BLOCK_SIZE:
            raise ValueError(f"{sizes}: must be at most {MAX_BLOCK_SIZE}")
        return sizes

    @field_validator("tree_sizes")
    @classmethod
    def _check_tree_sizes(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if sorted(set(sizes)) != list(sizes) or (sizes and not 1 <= sizes[0] <= sizes[-1] < MAX_BLOCK_SIZE):
            raise ValueError(f"{sizes}: must be ascending and 1 to {MAX_BLOCK_SIZE - 1}")
        return sizes

    @field_validator("baselines")
    @classmethod
    def _check_baselines(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(names) - set(BASELINES)):
            raise ValueError(f"{unknown[0]!r}: must be of {', '.join(BASELINES)}")
        return names


class Swept(NamedTuple):
    """What is used of sweeps."""

    pair: PairId
    candidates: tuple[int, ...]
    taus: dict[int, float]


class Plan(NamedTuple):
    """What to do, checked before any model is loaded; all of it plain values."""

    prompts: tuple[Prompt, ...]
    groups: tuple[tuple[int, ...], ...]
    """Places of the prompts that share a queue; all of one set."""
    sweep: Swept | None
    policies: dict[str, Path]
    """Directories by the name of the method; the first one is `policy`."""
    version: Version | None  # of the policy, when it is a registered one
    champion: int | None  # number of the version that is measured beside it
    price: StepPrice | None = None
    """Used where it was measured on such a device; measured anew otherwise."""

    def without(self, places: Collection[int], group_size: int) -> "Plan":
        """The plan of the other prompts."""
        kept = tuple(prompt for place, prompt in enumerate(self.prompts) if place not in places)
        return self._replace(prompts=kept, groups=group(kept, group_size)) if places else self

    def reasons(self, set_aside: Mapping[int, str]) -> str:
        """The first reasons why prompts are set aside, by their place."""
        prompts = {place: self.prompts[place] for place in set_aside}
        return reasons([SetAside(f"{p.text[:60]!r} of {p.set}", set_aside[i]) for i, p in prompts.items()])

    def learned_from(self, method: str) -> LearnedFrom:
        """The record of a policy's training prompts and taus; empty without a record or without the policy."""
        return LearnedFrom.read(self.policies[method]) if method in self.policies else LearnedFrom()


def plan_for(config: EvaluateConfig, prompts: tuple[Prompt, ...], swept: Swept | None, registry: Registry) -> Plan:
    """What to do with inputs that were read. Raises ValueError for policies that do not fit them."""
    groups = group(prompts, config.group_size)
    found = Plan(prompts, groups, swept, *find_policies(config, registry))
    _check_held_out(found)
    return found._replace(price=known_price(config, found))


def known_price(config: EvaluateConfig, plan: Plan) -> StepPrice | None:
    """The one beside the first sweep, or else beside the policy, if there is any."""
    known = config.sweep[0] if config.sweep else plan.policies.get(POLICY)
    price = join(known, PRICE_FILE) if known else ""
    return read_price(price) if price and is_file(price) else None


def read_inputs(config: EvaluateConfig) -> tuple[tuple[Prompt, ...], Swept | None]:
    """The prompts, and the sweeps if there are any. Raises ValueError where they do not fit the configuration."""
    for name in ("block_sizes", "tree_sizes"):
        if values := getattr(config, name):
            config.pair.need_draft(f"{name} {values}")
    config.pair.names()
    drawn = [p for name in config.prompts for p in load_prompts(name, config.num_prompts, config.shuffle_seed)]
    prompts = tuple({prompt.text: prompt for prompt in drawn}.values())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts: intervals need at least two")
    return prompts, _read_sweeps(config, prompts) if config.sweep else None


def group(prompts: Sequence[Prompt], num: int) -> tuple[tuple[int, ...], ...]:
    """Places of prompts that share a queue, so many at most, set by set."""
    by_set: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_set.setdefault(prompt.set, []).append(place)
    return tuple(tuple(places[i : i + num]) for places in by_set.values() for i in range(0, len(places), num))


def _read_sweeps(config: EvaluateConfig, prompts: Sequence[Prompt]) -> Swept:
    texts, summary, fitting, pairs = {prompt.text for prompt in prompts}, Summary(), Summary(), set[PairId]()
    for place in config.sweep:
        for part in read_parts(place):
            config.pair.check_made_for(f"sweep {place}", part.metadata.pair)
            pairs.add(part.metadata.pair)
            seen = [row for row in part.rows if row.prompt in texts]
            if seen:
                raise ValueError(
                    f"{len(seen)} of {len(prompts)} prompts are in sweep {place} and so not held out; "
                    f"the first: {seen[0].prompt_id} {seen[0].prompt[:60]!r}"
                )
            if config.seed <= part.metadata.config["seed"] < config.seed + config.repeats:
                raise ValueError(
                    f"seed {config.seed}: must be another than the sweep's {part.metadata.config['seed']}"
                )
            if config.block_sizes and not set(config.block_sizes) & set(part.metadata.candidates):
                raise ValueError(
                    f"block_sizes {config.block_sizes}: none is a candidate of the sweep {part.metadata.candidates}"
                )
            summary.add(part.rows)
            fitting.add([row for row in part.rows if row.temperature == config.temperature])
    if len(pairs) > 1:
        raise ValueError(f"sweeps {config.sweep}: of one pair wanted, these are of {' and '.join(map(str, pairs))}")
    metadata = part.metadata
    taus = (fitting if fitting.num_rows else summary).tau_curve
    return Swept(metadata.pair, tuple(metadata.candidates), taus)


def find_policies(config: EvaluateConfig, registry: Registry) -> tuple[dict[str, Path], Version | None, int | None]:
    """Directories of the policy and its rivals by the name of the method; the policy's version and the champion's.

    Raises ValueError where there is no such policy or it is for other models.
    """
    of_registry = config.policy in (CHAMPION, NEWEST)
    if config.policy == NO_POLICY or (of_registry and not config.pair.has_draft):
        return {}, None, None
    config.pair.need_draft(f"policy {config.policy}")
    version, directory = None, Path(config.policy).absolute()
    if of_registry:
        version = _find_version(config, registry)
        directory = _download(config, registry, version)
    policies, champion = {POLICY: directory}, None
    for rival in config.rivals:
        if rival != CHAMPION:
            name = Path(rival).name
            taken = name in (*policies, CHAMPION, AR, *BASELINES.values())
            taken |= name.startswith((METHOD_PREFIX, TREE_PREFIX))
            policies[rival if taken else name] = Path(rival).absolute()
        elif (found := _find_champion(config, registry)) is not None and found != version:
            place = _download(config, registry, found)
            try:
                load_policy(place)
                policies[CHAMPION], champion = place, found.number
            except ValueError as error:
                print(f"evaluate: the champion is left out: {error}")
    made_for = {name: load_policy(place).info.pair for name, place in policies.items()}
    config.pair.check_made_for(f"policy {directory}", made_for[POLICY])  # unfit rivals are left out when it is loaded
    return policies, version, champion


def _download(config: EvaluateConfig, registry: Registry, version: Version) -> Path:
    return registry.download(version, config.output / f"{version.name}-{version.number}")


def _find_champion(config: EvaluateConfig, registry: Registry) -> Version | None:
    try:
        return registry.find_champion(model_name(config.pair.models[0]))
    except ValueError:  # no such model
        return None


def _find_version(config: EvaluateConfig, registry: Registry) -> Version:
    name = model_name(config.pair.models[0])
    try:
        return registry.champion(name) if config.policy == CHAMPION else registry.newest(name)
    except ValueError as error:
        raise ValueError(f"{error}. Give the directory of a policy, or --policy {NO_POLICY}") from None


def _check_held_out(plan: Plan) -> None:
    """Raise ValueError where a policy remembers to have been trained on one of the prompts."""
    for method, directory in plan.policies.items():
        known = plan.learned_from(method).prompts
        seen = [prompt for prompt in plan.prompts if prompt_key(prompt.text) in known]
        if seen:
            key = prompt_ids(seen[0], 0, 0.0)[0]
            raise ValueError(
                f"{len(seen)} of {len(plan.prompts)} prompts are among those that policy {directory} was trained on; "
                f"the first: {key} {seen[0].text[:60]!r}"
            )
