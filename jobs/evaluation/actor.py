"""The actor of jobs/evaluate.py: one pair, rival drafts of its target, and an engine for every method.

The prompts of a group queue for the slots of an engine: when one ends, the next one starts, as in a busy server
(`blockpilot/evaluation/measurement.py`). Each method has a separate engine. The methods are interleaved, a few dozen
tokens at a time, so that a slow phase of the machine affects all of them. The oracle decodes after the others: it
selects the block size that was just the best on the same prompt, so it is a bound, not a method. AR decodes again,
interleaved with the oracle, to scale the oracle's seconds to the machine's speed during the other methods. The
control is AR in a second engine: the difference of the two is timing noise, which intervals over prompts do not
include.

The runs of a group do not depend on other measured groups. State that adapts while decoding (acceptance models,
running means, step costs that follow measured seconds) is reset before each group to its state after the `warm_up`
prompts of other groups, since a server runs longer than a group. So an interrupted evaluation measures the same as
an uninterrupted one, except that every process measures a missing step cost again.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch

from blockpilot.control.acceptance import UNTRAINED as UNTRAINED_PRIOR
from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.control.cost import StepPrice
from blockpilot.device import device_name, dtype_name
from blockpilot.drafts.families import family
from blockpilot.engine.engine import Engine
from blockpilot.engine.limits import EngineLimits
from blockpilot.evaluation.baselines import (
    DepthController,
    LookupAlone,
    LookupOrDraft,
    Margins,
    TreeBudget,
    WholeDraft,
)
from blockpilot.evaluation.measurement import Flow, RequestTiming, in_turns
from blockpilot.evaluation.pricing import holds_here, measure_price
from blockpilot.evaluation.statistics import MethodRun
from blockpilot.pairs.loading import Pair, with_draft
from blockpilot.policy.learned import LearnedPolicy, PromptPolicy, StepPolicy
from blockpilot.policy.store import load_policy
from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import prompt_ids
from blockpilot.sweep.sweep import sampler_seed
from blockpilot.types import CandidateSet, Layout, PairId, Request, Sampling
from jobs.common.cluster import num_threads
from jobs.common.registry import UNTRAINED
from jobs.evaluation.inputs import (
    AR,
    BASELINES,
    BUDGET,
    CONTROL,
    LOOKUP,
    MEANS,
    NO_LOOKUP,
    ORACLE,
    POLICY,
    RANDOM,
    SWITCH,
    TREE_PREFIX,
    VERIFICATION,
    WITH_LOOKUP,
    EvaluateConfig,
    Plan,
    method_name,
)

NUM_WARM_UP_TOKENS = 8
TOKENS_PER_TURN = 32  # per slot: a fraction of a second with the CPU caches filled by one method, as in a server


WITHOUT_LOOKUP = MEANS, VERIFICATION, BUDGET, NO_LOOKUP  # as published


class Setting(NamedTuple):
    """The loaded pair, its device, the step cost there, and the methods in order."""

    pair: PairId
    dtype: str
    device: str
    """Full name, including the threads of a CPU."""
    block_sizes: dict[str, int | None]
    """Fixed block size by method; None for trees, the control, and methods that choose per request or step."""
    price: StepPrice
    context: int
    """Mean context in tokens: the prompt and half of the answer."""
    left_out: dict[str, str]
    """Reasons why methods cannot run with this pair, by method."""
    rivals: dict[str, PairId]
    """Rival drafts by the first word of the names of their methods."""
    set_aside: dict[int, str]
    """Reasons why prompts cannot be decoded, by index in the plan."""


class RivalMethod(NamedTuple):
    """Method of a rival draft: a chain or tree of fixed size, or adaptive trees (size None)."""

    rival: str
    size: int | None
    layout: Layout


class Evaluator:
    """Ray actor that runs every method; nothing else decodes while it measures."""

    def __init__(self, config: EvaluateConfig, plan: Plan) -> None:
        torch.set_num_threads(num_threads(config.num_cpus))
        self._config, self._plan = config, plan

    def load(self) -> Setting:
        """Load pair, policies and prompts, and warm up. Raises ValueError if they do not fit together."""
        config, plan, pair = self._config, self._plan, self._config.pair.load()
        if plan.sweep is not None and plan.sweep.pair != pair.id:
            raise ValueError(
                f"sweep made for {plan.sweep.pair}; this pair is {pair.id}; sweep it into another directory"
            )
        policies, left_out = self._load_policies(pair)
        baselines = {BASELINES[name] for name in config.baselines}
        left_out |= dict.fromkeys(sorted(baselines - {*config.baseline_methods}), "the pair has no draft")
        set_aside = self._encode_prompts(pair)
        self._plan = plan = plan.without(set_aside, config)
        lengths, max_new_tokens = list(map(len, self._prompt_ids.values())), max(map(config.limit, plan.prompts))
        self._pair = pair
        self._fixed = {method_name(size): size for size in (1, *self._block_sizes(pair, policies))}
        self._candidates = candidates_of(policies) or CandidateSet(self._sizes)
        self._policies = policies
        context = sum(lengths) // len(lengths) + max_new_tokens // 2
        self._price = self._find_price(pair, context)
        self._rivals = self._load_rivals(pair)
        self._rival_prices = {name: self._find_price(rival, context) for name, rival in self._rivals.items()}
        self._rival_methods = {name: method for rival in self._rivals for name, method in self._methods_of(rival)}
        self._hindsight = dict[int, int]()  # the oracle's block sizes, by prompt
        num_slots, max_length = config.concurrency, min(max(lengths) + max_new_tokens, pair.max_length)
        self._engines = {
            m: Engine(self._pair_of(m), num_slots=num_slots, max_length=max_length, policy=self._prompt_policy(m))
            for m in self.methods
        }
        self._adapted = [self._warmed_up(parity) for parity in range(2)]
        self._reset()
        methods = [method for method in self.methods if method != ORACLE]
        if pair.target.device.type == "cuda":  # CUDA graphs are captured at the first use of a shape
            self._decode(methods, plan.groups[0], 0)
        else:
            self._decode(methods, plan.groups[0][:1], 0, NUM_WARM_UP_TOKENS)
        sizes = {method: self._fixed.get(method) for method in self.methods}
        machine = dtype_name(pair.target.dtype), device_name(pair.target.device)
        rivals = {name: rival.id for name, rival in self._rivals.items()}
        return Setting(pair.id, *machine, sizes, self._price, context, left_out, rivals, set_aside)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self._fixed.values())

    @property
    def methods(self) -> list[str]:
        """All methods in the order of the report."""
        baselines = self._config.baseline_methods
        without_oracle = [method for method in baselines if method != ORACLE]
        hindsight = [ORACLE] * (ORACLE in baselines)
        return [*self._fixed, *self._trees, *without_oracle, *self._rival_methods, *self._policies, *hindsight]

    def _warmed_up(self, parity: int) -> dict[str, Controller]:
        """Adaptive controllers for the groups of this parity, by method, warmed up on prompts of the other groups."""
        candidates = [index for indices in self._plan.groups[1 - parity :: 2] for index in indices]
        num = self._config.num_warm_up
        warm_up = candidates[:: max(1, len(candidates) // max(1, num))][:num]
        without_policy = [
            method for method, engine in self._engines.items() if engine.policy is None and method != ORACLE
        ]
        adapting = [method for method in without_policy if self._size(method, 0, 0) is None]
        self._reset()
        if warm_up:
            self._decode(adapting, warm_up, 0)
        return {method: self._engines[method].controller for method in adapting}

    def _reset(self, group: int | None = None) -> None:
        """Reset the controllers to their state before `group`; None: to their state before any decoding."""
        warmed_up = {} if group is None else self._adapted[group % 2]
        for method, engine in self._engines.items():
            engine.controller = deepcopy(warmed_up[method]) if method in warmed_up else self._controller(method)

    def _controller(self, method: str) -> Controller:
        if (rival_method := self._rival_methods.get(method)) is not None:
            max_depth, price = self._rivals[rival_method.rival].block_size - 1, self._rival_prices[rival_method.rival]
            return Controller(AcceptanceModel(max_depth), price)
        learned, price = self._policies.get(method), self._price
        prior = learned if isinstance(learned, StepPolicy) else UNTRAINED_PRIOR
        model = AcceptanceModel(self._pair.block_size - 1, prior)
        if method == MEANS:
            return DepthController(model, price)
        if method in (LOOKUP, SWITCH):
            return (LookupAlone if method == LOOKUP else LookupOrDraft)(model, price)
        if method == VERIFICATION:
            return WholeDraft(Margins(model.deepest), price)
        return TreeBudget(model, price) if method == BUDGET else Controller(model, price)

    def measure(self, repeat: int, group: int) -> list[MethodRun]:
        """Decode one group with every method; returns a run per method and prompt, compared with AR's text."""
        self._reset(group)
        indices, methods = self._plan.groups[group], [m for m in self.methods if m != ORACLE]
        start = (repeat + group) % len(methods)
        measured = self._decode(methods[start:] + methods[:start], indices, repeat)
        if ORACLE in self.methods:
            timings = zip(*(measured[name] for name in self._fixed), strict=True)  # by request
            self._hindsight = {i: self._best_size(sizes) for i, sizes in zip(indices, timings, strict=True)}
            later = self._decode([ORACLE, AR], indices, repeat)
            before_s, later_s = (sum(timing.total_s for timing in ar) for ar in (measured[AR], later[AR]))
            measured = measured | {ORACLE: [timing.at_pace(before_s / later_s) for timing in later[ORACLE]]}
        return [
            MethodRun(method, index, repeat, measured[method][i].totals(reference=measured[AR][i].output))
            for method in self.methods
            for i, index in enumerate(indices)
        ]

    def _best_size(self, timings: Sequence[RequestTiming]) -> int:
        """The best fixed block size of one request by measured tau and step cost; timings: one per fixed size."""
        # Without the token of the prefill.
        taus = [(len(timing.output) - 1) / max(len(timing.block_sizes), 1) for timing in timings]
        costs = self._price.relative(self._sizes, self._config.concurrency)
        rates = [tau / cost for tau, cost in zip(taus, costs, strict=True)]
        return self._sizes[rates.index(max(rates))]

    def _decode(
        self, methods: Sequence[str], indices: Sequence[int], repeat: int, max_tokens: int | None = None
    ) -> dict[str, list[RequestTiming]]:
        """Decode these prompts by every method, interleaved in this order, with at most `max_tokens` tokens each."""
        flows = {}
        for method in methods:
            requests = [self._request(index, method, repeat, max_tokens) for index in indices]
            flows[method] = Flow(self._engines[method], requests)
        in_turns(list(flows.values()), TOKENS_PER_TURN * self._config.concurrency)
        return {method: flow.results for method, flow in flows.items()}

    def _size(self, method: str, index: int, repeat: int) -> int | None:
        if method in (CONTROL, ORACLE):
            return 1 if method == CONTROL else self._hindsight[index]
        if method in self._rival_methods:
            return self._rival_methods[method].size
        if method != RANDOM:
            return (self._fixed | self._trees).get(method)
        prompt = self._plan.prompts[index]
        digest = hashlib.sha256(f"random {self._config.seed + repeat} {prompt.text}".encode()).digest()
        return self._candidates[int.from_bytes(digest[:8], "big") % len(self._candidates)]

    def _request(self, index: int, method: str, repeat: int, max_tokens: int | None = None) -> Request:
        config, seed, prompt = self._config, self._config.seed + repeat, self._plan.prompts[index]
        limit, temperature = config.limit(prompt), config.temperature_of(prompt)
        key = prompt_ids(prompt, seed, temperature)[0]
        sampling = Sampling(temperature=temperature, top_p=config.top_p, seed=sampler_seed(seed, key))
        return Request(
            self._prompt_ids[prompt],
            limit if max_tokens is None else min(limit, max_tokens),
            sampling,
            self._size(method, index, repeat),
            self._pair.stop_token_ids,
            layout=self._layout(method),
            lookup=True if method.endswith(WITH_LOOKUP) else False if method in WITHOUT_LOOKUP else None,
        )

    def _layout(self, method: str) -> Layout:
        if method in self._rival_methods:
            return self._rival_methods[method].layout
        return "tree" if method in self._trees else "chain" if method in (MEANS, VERIFICATION) else "auto"

    @property
    def _trees(self) -> dict[str, int]:
        """Block sizes of the fixed trees, by method."""
        endings = ["", WITH_LOOKUP] if LOOKUP in self._config.baseline_methods else [""]
        sizes = self._config.tree_sizes
        return {f"{TREE_PREFIX}{num}{ending}": num + 1 for ending in endings for num in sizes}

    def _prompt_policy(self, method: str) -> PromptPolicy | None:
        """The policy of kind prompt that fixes block sizes, if the method has one."""
        learned = self._policies.get(method)
        return learned if isinstance(learned, PromptPolicy) else None

    def _pair_of(self, method: str) -> Pair:
        rival_method = self._rival_methods.get(method)
        return self._pair if rival_method is None else self._rivals[rival_method.rival]

    # --- loading ---

    def _load_rivals(self, pair: Pair) -> dict[str, Pair]:
        """Pairs of the target with rival drafts, by the kind of the draft; numbered if several have the same kind."""
        rivals: dict[str, Pair] = {}
        for draft in self._config.rival_drafts:
            rival = with_draft(pair, draft)
            kind = family(rival.draft)
            number = sum(name.split("-")[0] == kind for name in rivals) + 1
            rivals[kind if number == 1 else f"{kind}-{number}"] = rival
        return rivals

    def _methods_of(self, rival: str) -> Iterator[tuple[str, RivalMethod]]:
        config, trained = self._config, self._rivals[rival].block_size
        sizes = config.block_sizes or default_block_sizes(trained)
        for size in [size for size in sizes if size <= trained] or [trained]:
            yield f"{rival} {method_name(size)}", RivalMethod(rival, size, "chain")
        for num in config.tree_sizes:
            yield f"{rival} {TREE_PREFIX}{num}", RivalMethod(rival, num + 1, "tree")
        if UNTRAINED in config.baseline_methods:
            yield f"{rival} {UNTRAINED}", RivalMethod(rival, None, "auto")

    def _load_policies(self, pair: Pair) -> tuple[dict[str, LearnedPolicy], dict[str, str]]:
        """Policies that fit the pair, and reasons why others do not. Raises ValueError if `policy` does not fit."""
        loaded, left_out = {}, {}
        for name, directory in self._plan.policies.items():
            policy = load_policy(directory)
            try:
                policy.check(pair)
                loaded[name] = policy
            except ValueError as error:
                if name == POLICY:
                    raise
                left_out[name] = str(error)
        return loaded, left_out

    def _block_sizes(self, pair: Pair, policies: dict[str, LearnedPolicy]) -> tuple[int, ...]:
        if self._config.block_sizes:
            return self._config.block_sizes
        candidates = candidates_of({POLICY: policies[POLICY]}) if policies else None
        return tuple(size for size in candidates or () if size > 1) or default_block_sizes(pair.block_size)

    def _find_price(self, pair: Pair, context: int) -> StepPrice:
        """The plan's step cost if it is of this pair and device; otherwise measured now."""
        if (price := self._plan.price) is not None and holds_here(price, pair):
            return price
        return measure_price(pair, self._config.concurrency, context)

    def _encode_prompts(self, pair: Pair) -> dict[int, str]:
        """Encode all prompts; returns reasons why prompts cannot be decoded, by index in the plan.

        Raises ValueError if fewer than two prompts are left.
        """
        limits = EngineLimits(pair.max_length, pair.max_length, pair.block_size, pair.vocab_size)
        self._prompt_ids, set_aside = dict[Prompt, tuple[int, ...]](), dict[int, str]()
        for index, prompt in enumerate(self._plan.prompts):
            try:
                ids = prompt.encode(pair.tokenizer)
                limits.check(Request(ids, max_new_tokens=1))
                self._prompt_ids[prompt] = ids
            except ValueError as error:
                set_aside[index] = str(error)
        if len(self._prompt_ids) < 2:
            raise ValueError(f"intervals need at least two prompts; set aside: {self._plan.reasons(set_aside)}")
        return set_aside


def candidates_of(policies: Mapping[str, LearnedPolicy]) -> CandidateSet | None:
    """Candidates of the first policy of kind prompt, if there is one."""
    return next((policy.candidates for policy in policies.values() if isinstance(policy, PromptPolicy)), None)


def default_block_sizes(trained: int) -> tuple[int, ...]:
    """One to four quarters of the draft's trained block size, without 1."""
    return tuple(size for size in sorted({trained * quarter // 4 for quarter in range(1, 5)}) if size > 1)
