"""Headroom of the choice: what perfect forecasts of nodes, of depths, or of both would bring.

Prompts are really decoded, but the clock is a step cost: no overhead, no timing noise, and the cost may be that of
another machine. So the gap between the choice and foresight is due to forecasts alone, and what a measured evaluation
loses against these figures is due to overhead and to errors of the cost. Foresight knows the texts of plain decoding.
Counted are steps of a full batch without prompts.

    python -m jobs.bench.headroom --evaluation workflows/evaluations/lookup-T0-load4 --tree-sizes 7
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from blockpilot.control.acceptance import AcceptanceModel, Paths
from blockpilot.control.choose import Trees
from blockpilot.control.controller import Controller, DepthPlan, Planned, StepOutcome
from blockpilot.control.cost import Load, StepPrice
from blockpilot.drafts.choices import ConditionalCandidates
from blockpilot.engine.drafting import NUM_CANDIDATES
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.tables import markdown
from blockpilot.native.growing import Nodes
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import load_prompts
from blockpilot.storage import join, read_bytes
from blockpilot.types import Request, Sampling
from jobs.common.cluster import num_cores
from jobs.common.config import Config, PairConfig, Place, main

Array = NDArray[Any]
Texts = dict[int, list[int]]
"""Answers by request id."""


class HeadroomConfig(Config):
    """Pair, and the evaluation whose step cost, load, temperature and prompt sets are used."""

    pair: PairConfig = PairConfig()
    evaluation: Place = "workflows/evaluations/lookup-T0-load1"
    """Output directory of jobs/evaluate.py."""
    num_prompts: int = Field(default=12, ge=1)
    """Maximum prompts of each set."""
    tree_sizes: tuple[int, ...] = (3, 7, 15)
    """Fixed trees with lookup to compare with."""
    max_new_tokens: int = Field(default=48, ge=2)
    """Maximum tokens of an answer."""


class Clock(Controller):
    """Controller whose steps take what the step cost says."""

    latest = StepOutcome(Load(0))

    def learn(self, outcome: StepOutcome, seconds: float) -> None:
        super().learn(outcome, self.price.seconds(outcome.load))
        self.latest = outcome


class Foresight(Clock):
    """Controller that knows which nodes are right, how deep drafts are right, or both, from the texts."""

    def __init__(self, model: AcceptanceModel, price: StepPrice, texts: Texts, *, nodes: bool, depths: bool) -> None:
        super().__init__(model, price, follows=False)
        self.engine: Engine | None = None
        self._texts, self._knows_nodes, self._knows_depths = texts, nodes, depths
        self._paths: Paths | None = None

    def _upcoming(self) -> list[list[int]]:
        """[R]: the tokens after every decoding row's text."""
        assert self.engine is not None
        rows = self.engine._rows
        return [self._texts[row.request_id][len(row.tokens) - len(row.request.prompt_ids) :] for row in rows]

    def cut_paths(self, paths: Paths) -> Paths | None:
        self._paths = super().cut_paths(paths)
        return self._paths

    def plan(self, rows: Planned, other_load: Load) -> DepthPlan:
        """The choice's plan, or depths to the last position of which a candidate is right, where that saves time."""
        plan, paths = super().plan(rows, other_load), self._paths
        self._paths = None  # paths are not cut in every step
        slots = np.flatnonzero(rows.max_depths).tolist()
        if not self._knows_depths or not slots:
            return plan
        depths, saved_s = np.zeros_like(plan.depths), 0.0
        token_s, upcoming = self.price.mean_token_s(Load(len(plan.depths))), self._upcoming()
        for slot, choices in zip(slots, self._drafted(slots, rows.max_depths[slots].tolist()), strict=True):
            depth = _num_right([set(tokens) for tokens in choices], upcoming[slot])
            path = [] if paths is None else paths.tokens[slot, : paths.sizes[slot]].tolist()
            more = depth - _num_right([{token} for token in path], upcoming[slot])
            row_s = more * (1 / plan.rates[rows.kinds[slot]] - token_s) - depth * self.price.slot_s
            if more > 0 and row_s > 0:
                depths[slot] = depth
                saved_s += row_s
        return plan._replace(depths=depths if saved_s > self.price.launch_s else np.zeros_like(depths))

    def _drafted(self, slots: list[int], depths: list[int]) -> Iterator[list[list[int]]]:
        """For the row of every slot, the draft's choices for each of its depths[i] positions."""
        assert self.engine is not None
        drafter, rows = self.engine._drafter, [self.engine._rows[slot] for slot in slots]
        drafter.update_cache(rows, slots)
        proposed = drafter.propose(rows, slots, depths, NUM_CANDIDATES)
        choices = proposed.candidates if isinstance(proposed, ConditionalCandidates) else proposed
        positions = iter(choices.tokens.reshape(sum(depths), -1).tolist())
        return (list(islice(positions, depth)) for depth in depths)

    def select(self, trees: Trees, rates: Array, drafted: Load) -> Array:
        """The choice's selection, or, with knowledge of the nodes, of right ones."""
        if not self._knows_nodes:
            return super().select(trees, rates, drafted)
        nodes = trees.nodes._replace(chances=np.zeros_like(trees.nodes.chances))
        for r, upcoming in enumerate(self._upcoming()):
            _order_right_first(nodes, r, upcoming)
        for values, changed in zip(trees.nodes, nodes, strict=True):
            values[:] = changed  # the trees are made of these arrays
        return super().select(trees._replace(nodes=nodes), rates, drafted)


def _num_right(choices: Sequence[set[int]], upcoming: Sequence[int]) -> int:
    """Number of positions, from the first on, of which a choice is right."""
    right = [token in tokens for tokens, token in zip(choices, upcoming, strict=False)]
    return right.index(False) if False in right else len(right)


def _order_right_first(nodes: Nodes, r: int, upcoming: Sequence[int]) -> None:
    """Move the right nodes of tree r before the others, and set all chances to 1 or 0, in place."""
    num, is_right = int(nodes.num[r]), [True]
    for j in range(num):
        depth = int(nodes.depths[r, j])
        follows = is_right[int(nodes.parents[r, j])] and depth <= len(upcoming)
        is_right.append(follows and int(nodes.tokens[r, j]) == upcoming[depth - 1])
    order = np.argsort(~np.array(is_right), kind="stable")  # the anchor stays first
    new_index = np.argsort(order)
    nodes.parents[r, :num] = new_index[nodes.parents[r, :num]]
    nodes.chances[r, :num] = is_right[1:]
    for values in nodes[:-1]:
        values[r, :num] = values[r, order[1:] - 1]


class Decoded(NamedTuple):
    """Tokens per second by the clock, means of a step, and the texts."""

    rate: float
    num_drafted: float
    num_verified: float
    texts: Texts


def decode(pair: Pair, requests: Sequence[Request], num_rows: int, controller: Clock) -> Decoded:
    """Decode the requests with this controller, `num_rows` at a time."""
    length = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    engine = Engine(pair, num_slots=num_rows, max_length=length, controller=controller)
    if isinstance(controller, Foresight):
        controller.engine = engine
    texts: Texts = {engine.add(request): [] for request in requests}
    totals = np.zeros(5)
    while not engine.idle:
        steps = engine.step()
        for step in steps:
            texts[step.request_id] += step.tokens
        load, num_tokens = controller.latest.load, sum(len(step.tokens) for step in steps)
        if load.rows == num_rows and not controller.latest.num_prompt_tokens:
            totals += num_tokens, controller.price.seconds(load), load.num_drafted, load.num_verified, 1
    tokens, seconds, drafted, verified, num_steps = totals.tolist()
    if not num_steps:
        raise ValueError(f"num_prompts: no step had {num_rows} rows and no prompt; more prompts are needed")
    return Decoded(tokens / seconds, drafted / num_steps, verified / num_steps, texts)


def run(config: HeadroomConfig) -> dict[str, float]:
    """Print a table; returns the rates over plain decoding's. Raises ValueError for an unreadable evaluation."""
    torch.set_num_threads(num_cores())
    place = join(config.evaluation, "evaluation.json")
    try:
        evaluation = json.loads(read_bytes(place))
        price = StepPrice.from_fields(evaluation["setting"]["price"])
        settings = evaluation["config"]
        num_rows, sampling = settings["concurrency"], Sampling(settings["temperature"], seed=settings["seed"])
        names = settings["prompts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: not an evaluation with a step cost ({error})") from None
    pair = config.pair.load()
    prompts = [p.encode(pair.tokenizer) for name in names for p in load_prompts(name, config.num_prompts)]
    np.random.default_rng(0).shuffle(prompts)

    def requests(**options: Any) -> list[Request]:
        return [Request(prompt, config.max_new_tokens, sampling, **options) for prompt in prompts]

    def new_model() -> AcceptanceModel:
        return AcceptanceModel(pair.block_size - 1)

    plain = decode(pair, requests(block_size=1), num_rows, Clock(new_model(), price, follows=False))
    results = {"plain": plain}
    for size in config.tree_sizes:
        fixed_tree = requests(block_size=size + 1, layout="tree", lookup=True)
        controller = Clock(new_model(), price, follows=False)
        results[f"tree {size} with lookup"] = decode(pair, fixed_tree, num_rows, controller)
    results["choice"] = decode(pair, requests(), num_rows, Clock(new_model(), price, follows=False))
    for name, nodes, depths in (("nodes", True, False), ("depths", False, True), ("nodes and depths", True, True)):
        foresight = Foresight(new_model(), price, plain.texts, nodes=nodes, depths=depths)
        results[f"perfect {name}"] = decode(pair, requests(), num_rows, foresight)
    assert all(result.texts == plain.texts for result in results.values())
    rates = {name: result.rate / plain.rate for name, result in results.items()}
    rows = [
        {"method": name, "over AR": f"{rates[name]:.3f}"}
        | {"drafted": f"{result.num_drafted:.1f}", "verified": f"{result.num_verified:.1f}"}
        for name, result in results.items()
    ]
    print(f"{price.device}, {num_rows} rows, T={sampling.temperature:g}, positions and tokens a step:\n")
    print(markdown(rows))
    return rates


if __name__ == "__main__":
    main(HeadroomConfig, run)
