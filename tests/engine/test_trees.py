"""Trees grow by falling chance, are seen as trees, and give the text of one-token-at-a-time decoding."""

from itertools import islice, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.trees import Node, Slots, best_first, choices_of, tree_of, walk
from blockpilot.models.packing import Packing, depths_of
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.types import Layout, Request, Sampling, Step, Tree
from helpers.drafts import scatter
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of

CPU = torch.device("cpu")
SAMPLED = Sampling(1.0, seed=5)


@st.composite
def slots(draw: st.DrawFn, num_contexts: int = 2) -> Slots:
    """A few choices of a few slots, by the choice above or not, with chances that fall along them and may be 0."""
    depth, width, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    falling = st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks).map(
        lambda numbers: [n / (1 + sum(numbers)) for n in sorted(numbers, reverse=True)]
    )
    chances = [[[draw(falling) for _ in range(width)] for _ in range(depth)] for _ in range(num_contexts)]
    tokens = [[list(range(10 * d, 10 * d + ranks))] * width for d in range(depth)]
    place = st.lists(st.integers(0, width - 1), min_size=ranks, max_size=ranks)
    return Slots(tokens, chances, [[draw(place) for _ in range(width)] for _ in range(depth)])


def grow(of: Slots, num_nodes: int) -> Tree:
    """The most probable prefixes."""
    return tree_of(list(islice(best_first(choices_of(of)), num_nodes)))


def every_prefix(of: Slots) -> list[float]:
    """Chances of all nodes of the full tree, by falling chance, those of chance 0 left out."""
    found = []
    for depth in range(1, len(of.tokens) + 1):
        for ranks in product(*(range(len(after[0])) for after in of.tokens[:depth])):
            chance, num_later, after = 1.0, 0, 0
            for at, rank in enumerate(ranks):
                chance *= of.chances[min(num_later, len(of.chances) - 1)][at][after][rank]
                num_later += rank > 0
                after = of.places[at][after][rank]
            found.append(chance)
    return sorted((chance for chance in found if chance > 0), reverse=True)


@given(slots())
def test_best_first_gives_all_nodes_by_falling_chance_where_deviations_do_not_help(of: Slots) -> None:
    alike = of._replace(chances=of.chances[:1])
    nodes = list(best_first(choices_of(alike)))
    assert [node.chance for node in nodes] == pytest.approx(every_prefix(alike))
    assert len(list(best_first(choices_of(of)))) == len(every_prefix(of))


@given(slots(), st.integers(0, 12))
def test_a_tree_lies_inside_the_larger_one(of: Slots, num: int) -> None:
    def prefixes(tree: Tree) -> set[tuple[int, ...]]:
        paths = {0: ()}
        for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
            paths[i] = (*paths[parent], token)
        assert len(set(paths.values())) == len(paths)
        return set(paths.values())

    assert prefixes(grow(of, num)) <= prefixes(grow(of, num + 1))
    assert len(grow(of, num).tokens) == min(num, len(every_prefix(of)))


@given(slots(), st.integers(1, 20))
def test_first_choices_are_laid_out_first_and_parents_before_children(of: Slots, num: int) -> None:
    tree = grow(of, num)
    assert all(parent < i for i, parent in enumerate(tree.parents, 1))
    children, node, firsts = tree.children, 0, 0
    for token, *_ in best_first(choices_of(of), is_chain=True):
        if (child := children.get((node, token))) is None:
            break
        node, firsts = child, firsts + 1
    assert node == firsts  # so they are the first nodes, in their order
    assert tree.parents[:firsts] == tuple(range(firsts))


def test_the_walk_follows_the_targets_choices() -> None:
    #          anchor -> 5 -> 6 ; anchor -> 7 -> 6 -> 8
    nodes = [Node(5, 0, 0.6, 1, source=1), Node(7, 0, 0.3, 1, source=3), Node(6, 1, 0.3, 2, source=1),
             Node(6, 2, 0.2, 2, source=2), Node(8, 4, 0.1, 3)]  # fmt: skip
    tree = tree_of(nodes)
    assert tree == Tree((5, 6, 7, 6, 8), (0, 1, 0, 3, 4), (1, 1, 3, 2, 0))
    assert depths_of(tree.parents) == [0, 1, 2, 1, 2, 3]
    assert walk(tree, [7, 0, 0, 6, 8, 1]) == [0, 3, 4, 5]
    assert walk(tree, [5, 6, 1, 6, 8, 1]) == [0, 1, 2]
    assert walk(tree, [9, 6, 1, 6, 8, 1]) == [0]
    assert tree.is_chain is False


# --- what a token of a tree sees ---


@st.composite
def parents(draw: st.DrawFn, most: int = 9) -> list[int]:
    return [draw(st.integers(0, i)) for i in range(draw(st.integers(0, most)))]


@given(st.lists(st.tuples(parents(), st.integers(0, 12)), min_size=1, max_size=5))
@settings(deadline=None)
def test_a_token_sees_the_context_and_its_ancestors(rows: list[tuple[list[int], int]]) -> None:
    packing = Packing([1 + len(p) for p, _ in rows], [start for _, start in rows], CPU, [p for p, _ in rows])
    columns, positions = packing.columns.tolist(), packing.positions.tolist()
    for row, (of_row, start) in enumerate(rows):
        for i in range(1 + len(of_row)):
            line = [i]
            while line[-1]:
                line.append(of_row[line[-1] - 1])
            expected = sorted({*range(start), *(start + node for node in line)})
            assert packing.visible[row, 0, i].nonzero()[:, 0].tolist() == expected
            assert columns[packing.firsts[row] + i] == start + i
            assert positions[packing.firsts[row] + i] == start + len(line) - 1


@torch.inference_mode()
def test_every_branch_is_scored_as_alone(tiny_pair: Pair) -> None:
    """Beside a chain, a plain row and a prompt, over what earlier branches have left in the cache."""
    target, device = Target(tiny_pair.target, (1, 3)), tiny_pair.target.device
    tree = [0, 0, 1, 1, 2, 4]
    tokens = [[9, 20, 21, 22, 23, 24, 25], [9, 30, 31], [9], [40, 41, 42, 43]]
    context = [1, 2, 3, 4, 5]
    cache = target.new_cache(4, 16)
    cache.layers.fill_(3.0)  # what rejected tokens have left
    target.score_rows(torch.tensor([context] * 3), 0, cache, torch.arange(3))
    packing = Packing([7, 3, 1, 4], [5, 5, 5, 0], device, [tree, [0, 1], []], cut=3)
    view = cache.view(packing.rows, packing.columns, slice(0, 4), packing.length)
    packed = torch.tensor([token for row in tokens for token in row])
    hidden = target.score(packed, view, packing, features=False).hidden
    for row, (of_row, line_of) in enumerate(zip(tokens[:3], ([None, *tree], [None, 0, 1], [None]), strict=True)):
        for i in range(len(of_row)):
            line = [i]
            while line[-1]:
                line.append(line_of[line[-1]])
            branch = [of_row[node] for node in reversed(line)]
            alone = target.score_rows(torch.tensor([context + branch]), 0, target.new_cache(1, 16), torch.tensor([0]))
            assert torch.allclose(hidden[packing.firsts[row] + i], alone.hidden[0, -1], atol=1e-4)
    alone = target.score_rows(torch.tensor([tokens[3]]), 0, target.new_cache(1, 16), torch.tensor([0]))
    assert torch.allclose(hidden[-4:], alone.hidden[0], atol=1e-4)


# --- whole texts ---


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_give_the_text_of_plain_decoding(
    tiny_pair: Pair, sampling: Sampling, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch beside chains and plain rows, more requests than slots, up to the limit of the length."""
    prompts = [PROMPT[: 5 + 2 * i] for i in range(7)]
    requests = [
        Request(prompt, 14 + i, sampling, (12, 1, 5, 7, 16, 3, 9)[i], NEVER, layout=("chain" if i == 2 else "tree"))
        for i, prompt in enumerate(prompts)
    ]
    with torch.inference_mode():
        plain = [plain_text(tiny_pair, r.prompt_ids, r.max_new_tokens, sampling) for r in requests]
    engine = Engine(tiny_pair, num_slots=4, max_length=31, max_prefill_tokens=11)
    scatter(engine, [(*p, *text) for p, text in zip(prompts, plain, strict=True)], seed, monkeypatch)
    found = run(engine, requests)
    for request, text, steps in zip(requests, plain, found, strict=True):
        assert text_of(steps) == text[: 31 - len(request.prompt_ids)]
        for step in steps[1:]:
            check(step, request)
    decoded = [step for steps in found for step in steps]
    assert any(not step.tree.is_chain and step.num_accepted > 1 for step in decoded)
    assert any(moved(step) for step in decoded), "no accepted path had to be moved"


def check(step: Step, request: Request) -> None:
    assert request.block_size is not None
    assert step.block_size == 1 + len(step.tree.tokens) <= request.block_size
    assert step.tree.is_chain or request.layout == "tree"
    assert path(step) is not None


def path(step: Step) -> list[int] | None:
    """The nodes of the accepted tokens; None if they are no path of the tree."""
    nodes, node = [], 0
    for token in step.tokens[: step.num_accepted]:
        children = [i for i, t in enumerate(step.tree.tokens, 1) if t == token and step.tree.parents[i - 1] == node]
        if len(children) != 1:
            return None
        node = children[0]
        nodes.append(node)
    return nodes


def moved(step: Step) -> bool:
    nodes = path(step) or []
    return nodes != list(range(1, len(nodes) + 1)) and step.finish_reason is None


def test_trees_leave_the_caches_of_plain_decoding(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's keys and values of every final token, and the draft's of its context."""
    with torch.inference_mode():
        text = plain_text(tiny_pair, PROMPT, 30, SAMPLED)
    layers = []
    for block_size in (2, 14):
        engine = Engine(tiny_pair, num_slots=1, max_length=64, prefix_tokens=64)  # a kept prefix is caught up with
        scatter(engine, [(*PROMPT, *text)], 1, monkeypatch)
        [steps] = run(engine, [Request(PROMPT, 30, SAMPLED, block_size, NEVER, layout="tree")])
        end = len(PROMPT) + 29
        layers.append([cache.layers[..., :end, :] for cache in (engine._cache, engine._drafter.cache)])
    assert any(moved(step) for step in steps)
    for after_short, after_trees in zip(*layers, strict=True):
        torch.testing.assert_close(after_trees, after_short, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_real_draft_accepts_more_of_a_tree_than_of_a_chain(embedded_pair: Pair, temperature: float) -> None:
    """And the text is the target's own."""
    ids = embedded_pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why is the sky blue?"}], add_generation_prompt=True, return_dict=False
    )
    steps = {
        (layout, size): list(
            generate(
                embedded_pair,
                ids,
                block_size=size,
                layout=layout,  # type: ignore[arg-type]
                max_new_tokens=40,
                temperature=temperature,
                seed=7,
                stop_token_ids=NEVER,
            )
        )
        for layout, size in (("chain", 1), ("chain", 8), ("tree", 16))
    }
    texts = {text_of(of_one) for of_one in steps.values()}
    assert len(texts) == 1
    assert len(steps["tree", 16]) < len(steps["chain", 8]) < len(steps["chain", 1])
    assert any(moved(step) for step in steps["tree", 16])


def test_logprobs_are_those_of_the_accepted_path(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(layout: str, block_size: int) -> list[float]:
        request = Request(PROMPT, 16, SAMPLED, block_size, NEVER, num_logprobs=2, layout=layout)  # type: ignore[arg-type]
        engine = Engine(tiny_pair, num_slots=1, max_length=64)
        with torch.inference_mode():
            text = plain_text(tiny_pair, PROMPT, 16, SAMPLED)
        scatter(engine, [(*PROMPT, *text)], 3, monkeypatch)
        [steps] = run(engine, [request])
        assert layout == "chain" or any(moved(step) for step in steps)
        return [found.logprob for step in steps for found in step.logprobs]

    assert decode("tree", 10) == pytest.approx(decode("chain", 1), abs=1e-3)


@pytest.mark.parametrize(("layout", "deepest"), [("tree", 2), ("chain", 3)])
def test_trees_are_no_deeper_than_exactness_allows(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch, layout: Layout, deepest: int
) -> None:
    """Chains are: their tokens lie in the columns of their positions."""
    monkeypatch.setattr("blockpilot.engine.drafting.MAX_DEPTH", 2)
    engine, drafted = Engine(tiny_pair, num_slots=1, max_length=64), list[int]()
    propose = engine._drafter.propose
    monkeypatch.setattr(engine._drafter, "propose", lambda *asked: (drafted.extend(asked[2]), propose(*asked))[1])
    run(engine, [Request(PROMPT, 20, SAMPLED, 4, NEVER, layout=layout)])
    assert max(drafted) == deepest


def test_an_unknown_layout_is_refused(tiny_pair: Pair) -> None:
    engine = Engine(tiny_pair, num_slots=1, max_length=64)
    with pytest.raises(ValueError, match=r"layout 'star': must be one of auto, chain, tree"):
        engine.add(Request(PROMPT, 4, layout="star"))  # type: ignore[arg-type]
