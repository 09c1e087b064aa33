"""Synthetic rows of a dense sweep, whose best candidate and depth are known functions of the recorded values."""

import dataclasses
from functools import cache

import numpy as np
import torch
from torch import Tensor

from blockpilot.prompts.files import Message, Prompt
from blockpilot.storage import Place
from blockpilot.sweep.rows import NUM_CHOICES, Metadata, Sweep, SweepRow, prompt_ids, read_parts
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import PairId

CANDIDATES = [2, 4, 6, 8]
VOCAB_SIZE = 64
CONTEXT_SIZE, ANCHOR_SIZE = 8, 6
NUM_ANCHORS, NUM_PLACES = 40, 8  # of every synthetic row; places: anchors with a recorded step
DEPTH = 7  # slots with choices of the draft
LEADS, TRAILS = 0.9, 0.1  # probability that any draft is accepted: best candidate of the row, others
PAIR = PairId("org/Target-1B", "rev-t", "org/draft", "rev-d")


def metadata(**changes: object) -> Metadata:
    plain = Metadata({"seed": 0}, PAIR, "float32", VOCAB_SIZE, 8, CANDIDATES, {}, "unknown")
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def read_sweep(place: Place) -> Sweep:
    """The whole sweep from `read_parts`."""
    parts = list(read_parts(place))
    return Sweep([row for part in parts for row in part.rows], parts[0].metadata)


# --- synthetic rows ---
#
# A row has a best candidate, whose drafts are often accepted, unlike those of others. It has the largest mass in
# probs and the largest of the first four context values. An anchor has a depth, the number of its accepted drafted
# tokens if there are any: the candidate with the largest sum of context and embedding, minus one.


def heaviest(ids: list[int], probs: list[float]) -> tuple[int, float]:
    """Best candidate and its lead in mass; token i belongs to candidate i % 4."""
    mass = [sum(p for i, p in zip(ids, probs, strict=True) if i % 4 == c) for c in range(4)]
    order = sorted(range(4), key=lambda c: mass[c])
    return order[-1], mass[order[-1]] - mass[order[-2]]


def _distribution(generator: torch.Generator) -> tuple[list[int], list[float]]:
    """Six random ids with probabilities in which one candidate leads clearly."""
    while True:
        ids = sorted(torch.randperm(VOCAB_SIZE, generator=generator)[:6].tolist())
        weights = torch.rand(6, generator=generator) ** 2 + 1e-3
        probs: list[float] = (weights / weights.sum()).tolist()
        if heaviest(ids, probs)[1] > 0.1:
            return ids, probs


def _context(best: int, generator: torch.Generator) -> Tensor:
    """Random values [CONTEXT_SIZE]; the best candidate's is the largest of the first four by at least 1."""
    context = torch.randn(CONTEXT_SIZE, generator=generator)
    context[best] = context[:4].max() + 1
    return context


def _vectors_of_steps(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(contexts, embeddings, index of the candidate that gives the depth) of every anchor."""
    contexts = torch.randn(NUM_ANCHORS, CONTEXT_SIZE, generator=generator)
    embeddings = torch.randn(NUM_ANCHORS, ANCHOR_SIZE, generator=generator)
    largest = (contexts[:, :4] + embeddings[:, :4]).argmax(dim=1)
    contexts[torch.arange(NUM_ANCHORS), largest] += 1
    return contexts, embeddings, largest


def synthetic_rows(num_rows: int, seed: int, signal: bool = True, trails: float = TRAILS) -> list[SweepRow]:
    """Rows of a dense sweep. Without a signal, best candidates and depths do not depend on the recorded values."""
    return list(_rows(num_rows, seed, signal, trails))


@cache
def _rows(num_rows: int, seed: int, signal: bool, trails: float) -> tuple[SweepRow, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(_row(f"prompt {seed} {i}", generator, signal, trails) for i in range(num_rows))


def _row(text: str, generator: torch.Generator, signal: bool, trails: float) -> SweepRow:
    ids, probs = _distribution(generator)
    best = heaviest(ids, probs)[0]
    context = _context(best, generator)
    contexts, embeddings, largest = _vectors_of_steps(generator)
    if not signal:
        best = int(torch.randint(0, 4, (1,), generator=generator))
        largest = torch.randint(0, 4, (NUM_ANCHORS,), generator=generator)
    depths = torch.tensor(CANDIDATES)[largest] - 1
    room = torch.arange(NUM_ANCHORS - 1, -1, -1)  # drafted tokens that the answer's length leaves
    accepted: list[list[int]] = []
    for c, block_size in enumerate(CANDIDATES):
        right = torch.rand(NUM_ANCHORS, generator=generator) < (LEADS if c == best else trails)
        accepted.append((right * depths.clamp(max=block_size - 1).minimum(room)).tolist())
    emitted = [emitted_along(candidate_accepted) for candidate_accepted in accepted]
    full = NUM_ANCHORS - CANDIDATES[-1] + 1
    places = torch.randint(full - NUM_PLACES + 1, (1,), generator=generator) + torch.arange(NUM_PLACES)
    prompt = Prompt("synthetic", (Message("user", text),))
    return SweepRow(
        prompt_id=prompt_ids(prompt, 0, 0.0)[0],
        prompt_set="synthetic",
        prompt=text,
        num_prompt_tokens=3,
        output_tokens=torch.randint(0, VOCAB_SIZE, (NUM_ANCHORS + 1,), generator=generator).tolist(),
        finish_reason="length",
        candidates=CANDIDATES,
        taus=[NUM_ANCHORS / len(steps) for steps in emitted],
        num_steps=[len(steps) for steps in emitted],
        emitted_histograms=[
            [steps.count(n) for n in range(b + 1)] for b, steps in zip(CANDIDATES, emitted, strict=True)
        ],
        accepted=accepted,
        texts_agree=True,
        probs_ids=ids,
        probs=probs,
        tail_mass=0.0,
        context=context.tolist(),
        step_places=places.tolist(),
        step_contexts=contexts[places].half().numpy().tobytes(),
        step_embeddings=embeddings[places].half().numpy().tobytes(),
        seed=0,
        temperature=0.0,
    )


def with_choices(row: SweepRow, seed: int, *, depth: int = DEPTH, rightness: float = 0.7) -> SweepRow:
    """The row with choices of the draft at its recorded places, accepted `rightness` times as often as the draft's
    probabilities say, the same at every temperature.
    """
    generator, num = torch.Generator().manual_seed(seed), len(row.step_places)
    logits = 2 * torch.randn(num, depth, NUM_CHOICES + 2, generator=generator)
    log_probs = logits.log_softmax(dim=-1).sort(dim=-1, descending=True).values[..., :NUM_CHOICES]
    chances = rightness * log_probs.exp()
    ranks = (torch.rand(num, depth, 1, generator=generator) > chances.cumsum(dim=-1)).sum(dim=-1)
    scores = log_probs.half().numpy().astype("<f2").tobytes()
    recorded = np.where(ranks.numpy() < NUM_CHOICES, ranks.numpy(), -1).astype(np.int8)
    recorded[:, 1:][(recorded < 0).cumsum(axis=1)[:, :-1] > 0] = -2  # unknown below a slot without an accepted choice
    return dataclasses.replace(row, step_ranks=recorded.tobytes(), step_scores=scores, step_log_probs=scores)
