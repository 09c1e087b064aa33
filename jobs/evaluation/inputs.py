"""Configuration of jobs/evaluate.py and its plan: prompts, groups and policies.

Everything that can be checked before Ray starts and a model is loaded is checked here.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from blockpilot.control.cost import PRICE_FILE, StepPrice, read_price
from blockpilot.policy.dataset import prompt_key
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import Prompt, SetAside, answer_limit, is_in_half, load_prompts, reasons
from blockpilot.storage import is_file, join
from blockpilot.sweep.rows import prompt_ids, read_parts
from blockpilot.sweep.summary import Summary
from blockpilot.types import MAX_BLOCK_SIZE, PairId
from jobs.common.config import Config, LocalPath, PairConfig, Place
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import CHAMPION, UNTRAINED, Registry, Version, model_name

AR, POLICY, RANDOM, MEANS, ORACLE = "AR", "policy", "random", "running means", "oracle (bound)"
CONTROL, STATIC = "AR again", "best static"
VERIFICATION, BUDGET = "adaptive verification", "tree budget"
LOOKUP, SWITCH, NO_LOOKUP = "lookup alone", "lookup or draft", f"{UNTRAINED} without lookup"
# Parts of the names of methods: a fixed block size, a fixed tree by its nodes, and a tree with lookup.
METHOD_PREFIX, TREE_PREFIX, WITH_LOOKUP = "B=", "tree ", " with lookup"
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
    """Name of the method with a fixed block size."""
    return AR if block_size == 1 else f"{METHOD_PREFIX}{block_size}"


class EvaluateConfig(Config):
    """Methods to measure, prompts, and load."""

    pair: PairConfig = PairConfig()
    prompts: tuple[str, ...] = Field(min_length=1)
    """Names of prompt sets, and prompt files (.jsonl, .parquet, .txt). The policy's training prompts are refused."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Number of prompts of each set and file; by default all."""
    shuffle_seed: int = 0
    """Seed of the order in which the prompts of a set are taken."""
    policy: str = CHAMPION
    """Policy to measure: "champion" or "newest" of the registry, the directory of a policy, or "none". A target
    without a draft has no policy."""
    rivals: tuple[str, ...] = (CHAMPION,)
    """Further policies to measure: directories, and "champion" (skipped if there is none or it is `policy`)."""
    baselines: tuple[str, ...] = ("control", "random", "means", "untrained", "oracle")
    """Baselines to measure; `--baselines` without values measures none. A target without a draft has control and
    untrained only.
    control: AR again, for timing noise.
    random: a random block size for each prompt.
    means: chains whose depth follows running means of acceptance (Ollama).
    verification: one verification budget for the chains of all rows, by the draft's margins (vLLM).
    budget: a tree for each row, sized as if it were the only row (CaDDTree).
    untrained: BlockPilot's adaptive trees without training; a policy must beat it to be promoted.
    no-lookup: untrained, without prompt lookup.
    lookup: prompt lookup without the draft (vLLM's ngram), and the fixed trees with lookup.
    switch: prompt lookup if the text has a match, otherwise the draft (llama.cpp).
    oracle: the best block size for each prompt in hindsight, a bound."""
    rival_drafts: tuple[str, ...] = ()
    """Other drafts of the same target to measure, such as EAGLE-3, by hub id or local directory: with chains of the
    fixed block sizes up to the draft's, with the fixed trees, and with `untrained` if that is a baseline."""
    tree_sizes: tuple[int, ...] = ()
    """Numbers of nodes of the fixed draft trees (DDTree), ascending."""
    block_sizes: tuple[int, ...] | None = None
    """Fixed block sizes, ascending. By default the candidates of a policy of kind prompt, otherwise quarters of the
    draft's trained block size."""
    sweep: tuple[Place, ...] = ()
    """Sweeps that select the best fixed block size. Their prompts are refused, like the training prompts of
    policies."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature; 0 is greedy."""
    mixed: bool = False
    """Mixed traffic: every group has prompts of all sets, and half of the requests are greedy, the others at
    `temperature`. By default a group has prompts of one set, all at `temperature`."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: probability mass of the target's distribution that is kept; 1 keeps everything."""
    seed: int = Field(default=1, ge=-(2**62), lt=2**62)
    """Seed of the sampler; must differ from the sweep's. Each repeat adds one."""
    max_new_tokens: int = Field(default=128, ge=4)
    """Maximum tokens of an answer. With a concurrency above 1 each prompt has a separate limit, between half of
    this and this."""
    concurrency: int = Field(default=1, ge=1)
    """Requests decoded together; when one ends, the next one starts."""
    waves: int = Field(default=4, ge=1)
    """Size of a group (prompts that share a queue), divided by the concurrency. With more waves the draining of the
    batch at the end of a group matters less."""
    warm_up: int | None = Field(default=None, ge=0)
    """Prompts of other groups that adaptive methods decode before each group; 0 for none. By default 4 for each
    concurrent request, at least 16."""
    repeats: int = Field(default=1, ge=1)
    """Number of times that everything is measured."""
    output: LocalPath = Path("runs/evaluate")
    """Output directory; must be absolute in a submitted job."""
    accelerator_type: str | None = None
    """GPU type to run on; by default any GPU, or the CPU if there is none."""
    num_cpus: float = Field(default=1.0, gt=0)
    """CPU cores, and torch threads (at least one)."""
    relog: bool = False
    """Measure nothing; log the finished evaluation in `output` to MLflow."""

    @property
    def baseline_methods(self) -> list[str]:
        """Methods of the configured baselines; for a target without a draft only those that need none."""
        possible = BASELINES if self.pair.has_draft else WITHOUT_DRAFT
        return [method for name, method in BASELINES.items() if name in self.baselines and name in possible]

    @property
    def group_size(self) -> int:
        """Prompts that share a queue."""
        return self.concurrency * self.waves

    @property
    def num_warm_up(self) -> int:
        """Prompts of the warm-up."""
        return max(16, 4 * self.concurrency) if self.warm_up is None else self.warm_up

    def temperature_of(self, prompt: Prompt) -> float:
        """Sampling temperature of a prompt's answer."""
        return 0.0 if self.mixed and is_in_half(prompt) else self.temperature

    def limit(self, prompt: Prompt) -> int:
        """Maximum tokens of a prompt's answer."""
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
            raise ValueError(f"{unknown[0]!r}: must be one of {', '.join(BASELINES)}")
        return names


class Swept(NamedTuple):
    """Pair, candidates and tau by block size of the sweeps."""

    pair: PairId
    candidates: tuple[int, ...]
    taus: dict[int, float]


class Plan(NamedTuple):
    """Plan of an evaluation in plain values, checked before any model is loaded."""

    prompts: tuple[Prompt, ...]
    groups: tuple[tuple[int, ...], ...]
    """Indices of the prompts that share a queue; all of one set, unless the traffic is mixed."""
    sweep: Swept | None
    policies: dict[str, Path]
    """Directories by the name of the method; the first one is `policy`."""
    version: Version | None  # of the policy, when it is a registered one
    champion: int | None  # number of the champion that is also measured, if any
    price: StepPrice | None = None
    """Step cost, used if it was measured on the same kind of device; otherwise measured again."""

    def without(self, indices: Collection[int], config: EvaluateConfig) -> "Plan":
        """The plan without the prompts at these indices."""
        prompts = tuple(prompt for i, prompt in enumerate(self.prompts) if i not in indices)
        groups = group(prompts, config.group_size, config.mixed)
        return self._replace(prompts=prompts, groups=groups) if indices else self

    def reasons(self, set_aside: Mapping[int, str]) -> str:
        """The first reasons why prompts are set aside; `set_aside`: all reasons by index."""
        prompts = {i: self.prompts[i] for i in set_aside}
        return reasons([SetAside(f"{p.text[:60]!r} of {p.set}", set_aside[i]) for i, p in prompts.items()])

    def learned_from(self, method: str) -> LearnedFrom:
        """The record of a policy's training prompts and taus; empty without a record or without the policy."""
        return LearnedFrom.read(self.policies[method]) if method in self.policies else LearnedFrom()


def plan_for(config: EvaluateConfig, prompts: tuple[Prompt, ...], swept: Swept | None, registry: Registry) -> Plan:
    """The plan for these prompts and sweeps. Raises ValueError for policies that do not fit them."""
    groups = group(prompts, config.group_size, config.mixed)
    plan = Plan(prompts, groups, swept, *find_policies(config, registry))
    _check_held_out(plan)
    return plan._replace(price=known_price(config, plan))


def known_price(config: EvaluateConfig, plan: Plan) -> StepPrice | None:
    """Step cost of the first sweep, otherwise of the policy; None if there is none."""
    folder = config.sweep[0] if config.sweep else plan.policies.get(POLICY)
    file = join(folder, PRICE_FILE) if folder else ""
    return read_price(file) if file and is_file(file) else None


def read_inputs(config: EvaluateConfig) -> tuple[tuple[Prompt, ...], Swept | None]:
    """Read the prompts and the sweeps, if any. Raises ValueError if they do not fit the configuration."""
    for name in ("block_sizes", "tree_sizes"):
        if values := getattr(config, name):
            config.pair.need_draft(f"{name} {values}")
    config.pair.names()
    loaded = [p for name in config.prompts for p in load_prompts(name, config.num_prompts, config.shuffle_seed)]
    prompts = tuple({prompt.text: prompt for prompt in loaded}.values())
    if len(prompts) < 2:
        raise ValueError(f"{len(prompts)} prompts: intervals need at least two")
    return prompts, _read_sweeps(config, prompts) if config.sweep else None


def group(prompts: Sequence[Prompt], num: int, mixed: bool = False) -> tuple[tuple[int, ...], ...]:
    """Indices of the prompts of each group, at most `num`: all of one set or, if mixed, of all sets, interleaved."""
    by_set: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_set.setdefault(prompt.set, []).append(index)
    queues = list(by_set.values())
    if mixed:
        one_of_each = zip_longest(*queues)
        queues = [[index for indices in one_of_each for index in indices if index is not None]]
    return tuple(tuple(queue[i : i + num]) for queue in queues for i in range(0, len(queue), num))


def _read_sweeps(config: EvaluateConfig, prompts: Sequence[Prompt]) -> Swept:
    texts, summary, same_temperature, pairs = {prompt.text for prompt in prompts}, Summary(), Summary(), set[PairId]()
    for sweep in config.sweep:
        for part in read_parts(sweep):
            config.pair.check_made_for(f"sweep {sweep}", part.metadata.pair)
            pairs.add(part.metadata.pair)
            repeated = [row for row in part.rows if row.prompt in texts]
            if repeated:
                raise ValueError(
                    f"{len(repeated)} of {len(prompts)} prompts are in sweep {sweep} and so not held out; "
                    f"the first: {repeated[0].prompt_id} {repeated[0].prompt[:60]!r}"
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
            alike = part.rows if config.mixed else [row for row in part.rows if row.temperature == config.temperature]
            same_temperature.add(alike)
    if len(pairs) > 1:
        raise ValueError(f"sweeps {config.sweep}: of one pair wanted, these are of {' and '.join(map(str, pairs))}")
    metadata = part.metadata
    taus = (same_temperature if same_temperature.num_rows else summary).tau_curve
    return Swept(metadata.pair, tuple(metadata.candidates), taus)


def find_policies(config: EvaluateConfig, registry: Registry) -> tuple[dict[str, Path], Version | None, int | None]:
    """Directories of the policy and its rivals by method, the policy's version, and the champion's number.

    Raises ValueError if there is no such policy or it is for other models.
    """
    is_registered = config.policy in (CHAMPION, NEWEST)
    if config.policy == NO_POLICY or (is_registered and not config.pair.has_draft):
        return {}, None, None
    config.pair.need_draft(f"policy {config.policy}")
    version, directory = None, Path(config.policy).absolute()
    if is_registered:
        version = _find_version(config, registry)
        directory = _download(config, registry, version)
    policies, champion = {POLICY: directory}, None
    for rival in config.rivals:
        if rival != CHAMPION:
            name = Path(rival).name
            is_taken = name in (*policies, CHAMPION, AR, *BASELINES.values())
            is_taken |= name.startswith((METHOD_PREFIX, TREE_PREFIX))
            policies[rival if is_taken else name] = Path(rival).absolute()
        elif (registered := _find_champion(config, registry)) is not None and registered != version:
            champion_directory = _download(config, registry, registered)
            try:
                load_policy(champion_directory)
                policies[CHAMPION], champion = champion_directory, registered.number
            except ValueError as error:
                print(f"evaluate: the champion is left out: {error}")
    made_for = {name: load_policy(policy).info.pair for name, policy in policies.items()}
    # Rivals of another pair are skipped when they are loaded.
    config.pair.check_made_for(f"policy {directory}", made_for[POLICY])
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
    """Raise ValueError if a policy was trained on one of the prompts."""
    for method, directory in plan.policies.items():
        training_keys = plan.learned_from(method).prompts
        repeated = [prompt for prompt in plan.prompts if prompt_key(prompt.text) in training_keys]
        if repeated:
            key = prompt_ids(repeated[0], 0, 0.0)[0]
            raise ValueError(
                f"{len(repeated)} of {len(plan.prompts)} prompts are among those that policy {directory} was trained"
                f" on; the first: {key} {repeated[0].text[:60]!r}"
            )
