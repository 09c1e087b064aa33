"""The actor of jobs/evaluate.py: one pair, rival drafts of its target, and an engine for every method.

The prompts of a group queue for the slots of an engine, and the next one begins when one ends, as in a busy server
(`blockpilot/evaluation/measurement.py`). Every method has an engine of its own, and all take turns of some tens of
tokens, so that a slow moment of the machine falls on all of them. The oracle decodes after the others: it chooses by
the taus that every block size just had on the same prompt, so it is a bound and no method. AR decodes once more
beside it, to scale its seconds to the machine's speed of the other methods. The control repeats AR with an engine of
its own: their difference is noise of the clock, which intervals over prompts do not include.

A group's runs depend on the work, the models and the machine of the moment, and on no other group that was measured:
what adapts while decoding (acceptance models, running means, prices that follow the seconds of steps) starts each as
it was after the `warm_up` prompts, which are of other groups. A server is up for longer than a group. So an
evaluation that was interrupted measures what a whole one does; only a step price that was not given is measured again
by every process.
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
TOKENS_A_TURN = 32  # of each slot: a fraction of a second, in which caches are those of one method, as in a server


WITHOUT_LOOKUP = MEANS, VERIFICATION, BUDGET, NO_LOOKUP  # as they are published


class Setting(NamedTuple):
    """What the actor found: the pair, where it runs, what a step costs there, and the methods in order."""

    pair: PairId
    dtype: str
    device: str
    """Full name, with the threads of a CPU."""
    block_sizes: dict[str, int | None]
    """By method; None where it is chosen for a request or a step, of trees, and of the control."""
    price: StepPrice
    context: int
    """Mean length of the texts in the middle of their answers."""
    left_out: dict[str, str]
    """Methods that cannot run with this pair, and why."""
    rivals: dict[str, PairId]
    """Rival drafts beside the pair's, by the word that their methods begin with."""
    set_aside: dict[int, str]
    """Why prompts cannot be decoded, by their place in the plan."""


class RivalMethod(NamedTuple):
    """Method of a rival draft: a chain or tree of fixed size, or trees that its own probabilities buy (None)."""

    rival: str
    size: int | None
    layout: Layout


class Evaluator:
    """Runs every method; nothing else decodes while it measures."""

    def __init__(self, config: EvaluateConfig, plan: Plan) -> None:
        torch.set_num_threads(num_threads(config.num_cpus))
        self._config, self._plan = config, plan

    def load(self) -> Setting:
        """Load, check that everything fits, and warm up. Raises ValueError where it does not."""
        config, plan, pair = self._config, self._plan, self._config.pair.load()
        if plan.sweep is not None and plan.sweep.pair != pair.id:
            raise ValueError(f"sweep made for {plan.sweep.pair}; this pair is {pair.id}: sweep it to another place")
        policies, left_out = self._load_policies(pair)
        chosen = {BASELINES[name] for name in config.baselines}
        left_out |= dict.fromkeys(sorted(chosen - {*config.baseline_methods}), "the pair has no draft")
        set_aside = self._encode_prompts(pair)
        self._plan = plan = plan.without(set_aside, config.group_size)
        lengths, most = list(map(len, self._prompt_ids.values())), max(map(config.limit, plan.prompts))
        self._pair = pair
        self._fixed = {method_name(size): size for size in (1, *self._block_sizes(pair, policies))}
        self._candidates = candidates_of(policies) or CandidateSet(self._sizes)
        self._policies = policies
        context = sum(lengths) // len(lengths) + most // 2
        self._price = self._find_price(pair, context)
        self._rivals = self._load_rivals(pair)
        self._rival_prices = {name: self._find_price(rival, context) for name, rival in self._rivals.items()}
        self._of_rivals = {name: method for rival in self._rivals for name, method in self._methods_of(rival)}
        self._hindsight = dict[int, int]()  # the oracle's block sizes, by place
        num_slots, max_length = config.concurrency, min(max(lengths) + most, pair.max_length)
        self._engines = {
            m: Engine(self._pair_of(m), num_slots=num_slots, max_length=max_length, policy=self._fixing(m))
            for m in self.methods
        }
        self._adapted = [self._warmed_up(half) for half in range(2)]
        self._reset()
        rotating = [method for method in self.methods if method != ORACLE]
        if pair.target.device.type == "cuda":  # graphs are captured as their shapes come
            self._decode(rotating, plan.groups[0], 0)
        else:
            self._decode(rotating, plan.groups[0][:1], 0, NUM_WARM_UP_TOKENS)
        sizes = {method: self._fixed.get(method) for method in self.methods}
        here = dtype_name(pair.target.dtype), device_name(pair.target.device)
        rivals = {name: rival.id for name, rival in self._rivals.items()}
        return Setting(pair.id, *here, sizes, self._price, context, left_out, rivals, set_aside)

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self._fixed.values())

    @property
    def methods(self) -> list[str]:
        """In the order of the report."""
        baselines = self._config.baseline_methods
        others = [method for method in baselines if method != ORACLE]
        hindsight = [ORACLE] * (ORACLE in baselines)
        return [*self._fixed, *self._trees, *others, *self._of_rivals, *self._policies, *hindsight]

    def _warmed_up(self, half: int) -> dict[str, Controller]:
        """Controllers that adapt, by method, after prompts of the other half of the groups: every second one."""
        others = [place for places in self._plan.groups[1 - half :: 2] for place in places]
        some = others[:: max(1, len(others) // max(1, self._config.warm_up))][: self._config.warm_up]
        free = [method for method, engine in self._engines.items() if engine.policy is None and method != ORACLE]
        adapting = [method for method in free if self._size(method, 0, 0) is None]
        self._reset()
        if some:
            self._decode(adapting, some, 0)
        return {method: self._engines[method].controller for method in adapting}

    def _reset(self, group: int | None = None) -> None:
        """Make what adapts start as it was before a group, or as if nothing had been decoded."""
        adapted = {} if group is None else self._adapted[group % 2]
        for method, engine in self._engines.items():
            engine.controller = deepcopy(adapted[method]) if method in adapted else self._controller(method)

    def _controller(self, method: str) -> Controller:
        if (of_rival := self._of_rivals.get(method)) is not None:
            deepest, price = self._rivals[of_rival.rival].block_size - 1, self._rival_prices[of_rival.rival]
            return Controller(AcceptanceModel(deepest), price)
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
        """Decode one group with every method, and compare the texts with AR's; a run for each method and prompt."""
        self._reset(group)
        places, methods = self._plan.groups[group], [m for m in self.methods if m != ORACLE]
        start = (repeat + group) % len(methods)
        measured = self._decode(methods[start:] + methods[:start], places, repeat)
        if ORACLE in self.methods:
            of_requests = zip(*(measured[name] for name in self._fixed), strict=True)
            self._hindsight = {place: self._just_had(each) for place, each in zip(places, of_requests, strict=True)}
            later = self._decode([ORACLE, AR], places, repeat)
            before_s, later_s = (sum(each.total_s for each in ar) for ar in (measured[AR], later[AR]))
            measured = measured | {ORACLE: [each.at_pace(before_s / later_s) for each in later[ORACLE]]}
        return [
            MethodRun(method, place, repeat, measured[method][i].totals(reference=measured[AR][i].output))
            for method in self.methods
            for i, place in enumerate(places)
        ]

    def _just_had(self, measured: Sequence[RequestTiming]) -> int:
        """The best block size of one request, which it just had with every one, at the price of a step."""
        taus = [(len(each.output) - 1) / max(len(each.block_sizes), 1) for each in measured]  # without the prefill's
        costs = self._price.relative(self._sizes, self._config.concurrency)
        rates = [tau / cost for tau, cost in zip(taus, costs, strict=True)]
        return self._sizes[rates.index(max(rates))]

    def _decode(
        self, methods: Sequence[str], places: Sequence[int], repeat: int, at_most: int | None = None
    ) -> dict[str, list[RequestTiming]]:
        """The prompts at these places by every method, in turns that begin in this order; so many tokens at most."""
        flows = {}
        for method in methods:
            requests = [self._request(place, method, repeat, at_most) for place in places]
            flows[method] = Flow(self._engines[method], requests)
        in_turns(list(flows.values()), TOKENS_A_TURN * self._config.concurrency)
        return {method: flow.results for method, flow in flows.items()}

    def _size(self, method: str, place: int, repeat: int) -> int | None:
        if method in (CONTROL, ORACLE):
            return 1 if method == CONTROL else self._hindsight[place]
        if method in self._of_rivals:
            return self._of_rivals[method].size
        if method != RANDOM:
            return (self._fixed | self._trees).get(method)
        prompt = self._plan.prompts[place]
        digest = hashlib.sha256(f"random {self._config.seed + repeat} {prompt.text}".encode()).digest()
        return self._candidates[int.from_bytes(digest[:8], "big") % len(self._candidates)]

    def _request(self, place: int, method: str, repeat: int, at_most: int | None = None) -> Request:
        config, seed, prompt = self._config, self._config.seed + repeat, self._plan.prompts[place]
        limit = config.limit(prompt)
        key = prompt_ids(prompt, seed, config.temperature)[0]
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=sampler_seed(seed, key))
        return Request(
            self._prompt_ids[prompt],
            limit if at_most is None else min(limit, at_most),
            sampling,
            self._size(method, place, repeat),
            self._pair.stop_token_ids,
            layout=self._layout(method),
            lookup=True if method.endswith(WITH_LOOKUP) else False if method in WITHOUT_LOOKUP else None,
        )

    def _layout(self, method: str) -> Layout:
        if method in self._of_rivals:
            return self._of_rivals[method].layout
        return "tree" if method in self._trees else "chain" if method in (MEANS, VERIFICATION) else "auto"

    @property
    def _trees(self) -> dict[str, int]:
        """Block sizes of fixed trees by method."""
        endings = ["", WITH_LOOKUP] if LOOKUP in self._config.baseline_methods else [""]
        sizes = self._config.tree_sizes
        return {f"{TREE_PREFIX}{num}{ending}": num + 1 for ending in endings for num in sizes}

    def _fixing(self, method: str) -> PromptPolicy | None:
        """The policy that fixes block sizes, where a method has one."""
        learned = self._policies.get(method)
        return learned if isinstance(learned, PromptPolicy) else None

    def _pair_of(self, method: str) -> Pair:
        of_rival = self._of_rivals.get(method)
        return self._pair if of_rival is None else self._rivals[of_rival.rival]

    # --- loading ---

    def _load_rivals(self, pair: Pair) -> dict[str, Pair]:
        """Rival drafts on the pair's own target, by their kind; numbered where there are several of one."""
        found: dict[str, Pair] = {}
        for draft in self._config.rival_drafts:
            rival = with_draft(pair, draft)
            kind = family(rival.draft)
            number = sum(name.split("-")[0] == kind for name in found) + 1
            found[kind if number == 1 else f"{kind}-{number}"] = rival
        return found

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
        """Those that fit the pair; only of the first one is it an error not to."""
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
        """The one given, if it is of this pair on such a device; else measured now."""
        if (given := self._plan.price) is not None and holds_here(given, pair):
            return given
        return measure_price(pair, self._config.concurrency, context)

    def _encode_prompts(self, pair: Pair) -> dict[int, str]:
        """Encode all prompts; returns why some cannot be decoded, by place. ValueError if fewer than two can be."""
        limits = EngineLimits(pair.max_length, pair.max_length, pair.block_size, pair.vocab_size)
        self._prompt_ids, set_aside = dict[Prompt, tuple[int, ...]](), dict[int, str]()
        for place, prompt in enumerate(self._plan.prompts):
            try:
                ids = prompt.encode(pair.tokenizer)
                limits.check(Request(ids, max_new_tokens=1))
                self._prompt_ids[prompt] = ids
            except ValueError as error:
                set_aside[place] = str(error)
        if len(self._prompt_ids) < 2:
            raise ValueError(f"intervals need at least two prompts; set aside: {self._plan.reasons(set_aside)}")
        return set_aside


def candidates_of(policies: Mapping[str, LearnedPolicy]) -> CandidateSet | None:
    """Candidates of the first policy that chooses among some, if there is one."""
    return next((each.candidates for each in policies.values() if isinstance(each, PromptPolicy)), None)


def default_block_sizes(trained: int) -> tuple[int, ...]:
    """Quarters of the draft's trained block size; never 1."""
    return tuple(size for size in sorted({trained * quarter // 4 for quarter in range(1, 5)}) if size > 1)
