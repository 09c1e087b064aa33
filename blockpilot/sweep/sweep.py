"""Sweep: tau of every candidate block size on each prompt.

A replay decodes each prompt once and walks its finished text with every candidate. Decoding with all 2k + 1
candidates is the reference that the replay is tested against. The keyed sampler makes the text the same for every
candidate (exactly so in float32), so the comparison is fair.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from blockpilot.engine.engine import Engine
from blockpilot.engine.limits import EngineLimits
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.native.library import has_functions
from blockpilot.native.matching import TextIndex
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt
from blockpilot.sweep.replay import KnownTexts, Text, accepted_everywhere, choices_at, know, walk
from blockpilot.sweep.rows import (
    MIN_PROB,
    NUM_CHOICES,
    Method,
    Outcome,
    Reject,
    SweepRow,
    check_candidates,
    prompt_ids,
)
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import Prefill, Request, Sampling, Step


def sampler_seed(seed: int, prompt_id: str) -> int:
    """Sampler seed of one prompt, the same for every candidate; different prompts draw independent noise."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class _Steps(NamedTuple):
    """Recorded steps of a text: the `step_...` columns of a SweepRow."""

    step_places: list[int]
    step_contexts: bytes
    step_embeddings: bytes
    step_ranks: bytes = b""
    step_scores: bytes = b""
    step_log_probs: bytes = b""
    step_nodes: bytes = b""
    step_matches: bytes = b""


@dataclass
class CandidateRun:
    """One prompt decoded with one candidate: its text, the tokens that each verify step emitted, and in a dense sweep
    the drafted tokens accepted at every anchor.
    """

    block_size: int
    tokens: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prefill: Prefill | None = None
    steps: _Steps = field(default_factory=lambda: _Steps([], b"", b""))

    def add(self, step: Step) -> None:
        self.tokens += step.tokens
        self.finish_reason = step.finish_reason or self.finish_reason
        self.prefill = self.prefill or step.prefill
        if step.block_size:
            self.emitted.append(len(step.tokens))


@dataclass(frozen=True)
class SweepTurn:
    """One turn of a prompt in a sweep. `later_ids`: prompt_ids of later turns; `error`: why the turn cannot run."""

    prompt_id: str
    prompt: Prompt
    sampling: Sampling
    later_ids: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    error: str = ""

    def rejects(self, error: str) -> list[Reject]:
        """Rejects of this turn and of all later ones."""
        reject = Reject(self.prompt_id, self.prompt.set, self.prompt.text, error)
        return [reject, *(reject._replace(prompt_id=i, error=f"an earlier turn: {error}") for i in self.later_ids)]

    def text(self, answer: CandidateRun, max_new_tokens: int, max_length: int) -> Text:
        limit = min(len(self.prompt_ids) + max_new_tokens, max_length)
        return Text((*self.prompt_ids, *answer.tokens), len(self.prompt_ids), limit, self.sampling)

    def row(self, runs: Sequence[CandidateRun]) -> SweepRow:
        prefill = runs[-1].prefill  # of the largest candidate, which has a context vector if any candidate has one
        assert prefill is not None
        probs = prefill.probs
        ids = (probs >= MIN_PROB).nonzero()[:, 0]
        return SweepRow(
            prompt_id=self.prompt_id,
            prompt_set=self.prompt.set,
            prompt=self.prompt.text,
            num_prompt_tokens=len(self.prompt_ids),
            output_tokens=runs[0].tokens,
            finish_reason=runs[0].finish_reason,
            candidates=[run.block_size for run in runs],
            taus=[sum(run.emitted) / len(run.emitted) for run in runs],
            num_steps=[len(run.emitted) for run in runs],
            emitted_histograms=[[run.emitted.count(n) for n in range(run.block_size + 1)] for run in runs],
            accepted=[run.accepted for run in runs] if any(run.accepted for run in runs) else [],
            texts_agree=all(run.tokens == runs[0].tokens for run in runs),
            probs_ids=ids.tolist(),
            probs=probs[ids].tolist(),
            tail_mass=float(probs[probs < MIN_PROB].sum()),
            context=[] if prefill.context is None else prefill.context.float().tolist(),
            **runs[-1].steps._asdict(),
            seed=self.sampling.seed,
            temperature=self.sampling.temperature,
        )


Runs = list[CandidateRun] | str
"""A run for every candidate, or the reason why the turn cannot run."""


def sweep_prompts(
    pair: Pair,
    prompts: Sequence[Prompt],
    candidates: Sequence[int],
    *,
    method: Method = "replay",
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    num_slots: int = 16,
    step_samples: int = 64,
    text_block_size: int | None = None,
) -> Outcome:
    """Rows with the tokens that each verify step emits with every candidate block size, by one of three methods.

    `decode` decodes every prompt with each candidate. `replay` gives the same from one decoding of every prompt and
    draft passes over its text, `num_slots` prompts at a time. `dense` drafts at every position of the text, about tau
    times the work, and records the accepted tokens at every position, and the draft's choices at `step_samples`
    consecutive positions.

    `text_block_size` decodes the text of a replay, and does not change it. The default is 1 on a CPU, where wide
    steps of a full batch are slow, and the draft's trained block size on a GPU, where they cost little more.

    A prompt's follow-ups are asked after the target's answers; every turn has a row. A turn that cannot be swept
    (empty, longer than the context, finished by its prefill) becomes a reject, with all later turns of its prompt.
    Raises ValueError for settings that are wrong for every prompt, and for a pair without a draft.
    """
    pair.need_draft("a sweep")
    check_candidates(candidates, pair.max_length)
    if text_block_size is None:
        text_block_size = 1 if pair.target.device.type == "cpu" else pair.block_size
    run = partial(_decode, pair, candidates, max_new_tokens, num_slots)
    if method != "decode":
        dense = method == "dense"
        run = partial(_replay, pair, candidates, max_new_tokens, num_slots, dense, step_samples, text_block_size)
    return turn_by_turn(pair.tokenizer, prompts, Sampling(temperature, top_p, seed=seed), run)


def turn_by_turn(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    run: Callable[[Sequence[SweepTurn]], list[Runs]],
) -> Outcome:
    """Rows and rejects in the order of the prompts; `run` is called once per turn, with the turns of all prompts."""
    outcomes = [Outcome([], []) for _ in prompts]
    ids = [prompt_ids(prompt, sampling.seed, sampling.temperature) for prompt in prompts]
    turns = {i: _turn(tokenizer, prompt, ids[i], sampling) for i, prompt in enumerate(prompts)}
    while turns:
        results = run(list(turns.values()))
        next_turns = {}
        for (i, turn), runs in zip(turns.items(), results, strict=True):
            if isinstance(runs, str):
                outcomes[i].rejects.extend(turn.rejects(runs))
            elif not all(run.emitted for run in runs):
                outcomes[i].rejects.extend(turn.rejects("no verify step: the answer ended with its prefill"))
            else:
                outcomes[i].rows.append(turn.row(runs))
                if turn.later_ids:
                    answer = tokenizer.decode(runs[0].tokens, skip_special_tokens=True)
                    next_turns[i] = _turn(tokenizer, turn.prompt.followed_up(str(answer)), turn.later_ids, sampling)
        turns = next_turns
    rows = [row for outcome in outcomes for row in outcome.rows]
    return Outcome(rows, [reject for outcome in outcomes for reject in outcome.rejects])


def _turn(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ids: tuple[str, ...], sampling: Sampling) -> SweepTurn:
    turn = SweepTurn(ids[0], prompt, dataclasses.replace(sampling, seed=sampler_seed(sampling.seed, ids[0])), ids[1:])
    try:
        return dataclasses.replace(turn, prompt_ids=prompt.encode(tokenizer))
    except ValueError as error:
        return dataclasses.replace(turn, error=str(error))


def _decode(
    pair: Pair, candidates: Sequence[int], max_new_tokens: int, num_slots: int, turns: Sequence[SweepTurn]
) -> list[Runs]:
    """For every turn its finished runs in the order of the candidates, or the reason that it cannot run."""
    prompt_lengths = [len(turn.prompt_ids) for turn in turns if len(turn.prompt_ids) < pair.max_length]
    max_length = min(max(prompt_lengths, default=1) + max_new_tokens, pair.max_length)
    engine = Engine(pair, num_slots=num_slots, max_length=max_length, max_block_size=candidates[-1])
    # The pair's own limits, not the engine's, which depend on the other prompts.
    limits = EngineLimits(pair.max_length, pair.max_length, candidates[-1], pair.vocab_size)
    results: list[Runs] = [turn.error or [CandidateRun(size) for size in candidates] for turn in turns]
    running: dict[int, CandidateRun] = {}
    # Candidate by candidate, not prompt by prompt: a step is as wide as its widest row.
    for column, block_size in enumerate(candidates):
        for i, turn in enumerate(turns):
            runs = results[i]
            if isinstance(runs, str):
                continue
            request = Request(turn.prompt_ids, max_new_tokens, turn.sampling, block_size, pair.stop_token_ids)
            try:
                limits.check(request)
                running[engine.add(request)] = runs[column]
            except ValueError as error:
                results[i] = str(error)
    while not engine.idle:
        for step in engine.step():
            running[step.request_id].add(step)
    return results


def _replay(
    pair: Pair,
    candidates: Sequence[int],
    max_new_tokens: int,
    num_slots: int,
    dense: bool,
    step_samples: int,
    text_block_size: int,
    turns: Sequence[SweepTurn],
) -> list[Runs]:
    """The result of `_decode`, from one decoding of every turn and replays of its text."""
    if list(candidates) == [1]:
        return _decode(pair, candidates, max_new_tokens, num_slots, turns)
    results = _decode(pair, [text_block_size], max_new_tokens, num_slots, turns)
    answers = {i: runs[0] for i, runs in enumerate(results) if not isinstance(runs, str) and runs[0].emitted}
    texts = {i: turns[i].text(answer, max_new_tokens, pair.max_length) for i, answer in answers.items()}
    by_length = sorted(texts, key=lambda i: len(texts[i].tokens))
    for start in range(0, len(by_length), num_slots):
        group = by_length[start : start + num_slots]
        known_texts = know(pair, [texts[i] for i in group])
        runs_of_group = _replay_group(pair, known_texts, [answers[i] for i in group], candidates, dense)
        for index, (i, runs) in enumerate(zip(group, runs_of_group, strict=True)):
            if dense:
                runs[-1].steps = _recorded_steps(pair, known_texts, index, runs[-1], step_samples)
            results[i] = runs
    return results


def _replay_group(
    pair: Pair, known_texts: KnownTexts, answers: Sequence[CandidateRun], candidates: Sequence[int], dense: bool
) -> Iterator[list[CandidateRun]]:
    """For each text, the runs of all candidates; `answers` are the runs that decoded the texts."""
    block_sizes = [size for size in candidates if size > 1]
    if dense:
        accepted = list(zip(*(accepted_everywhere(pair, known_texts, size) for size in block_sizes), strict=True))
        emitted = [list(map(emitted_along, text_accepted)) for text_accepted in accepted]
    else:
        accepted = [([],) * len(block_sizes) for _ in answers]
        emitted = walk(pair, known_texts, block_sizes)
    contexts = known_texts.prefill_context
    for answer, context, text_emitted, text_accepted in zip(answers, contexts, emitted, accepted, strict=True):
        assert answer.prefill is not None
        prefill = answer.prefill._replace(context=context.float())
        num_steps = len(answer.tokens) - 1  # of plain decoding
        counts = {1: ([1] * num_steps, [0] * num_steps * dense)}
        counts |= zip(block_sizes, zip(text_emitted, text_accepted, strict=True), strict=True)
        yield [
            dataclasses.replace(answer, block_size=size, prefill=prefill, emitted=emitted_by_step, accepted=by_anchor)
            for size, (emitted_by_step, by_anchor) in counts.items()
            if size in candidates
        ]


def _recorded_steps(pair: Pair, known_texts: KnownTexts, index: int, run: CandidateRun, num_samples: int) -> _Steps:
    """Up to `num_samples` consecutive steps of a text from the largest candidate's run; the first step is random.

    Steps whose block would exceed the text's length limit are left out.
    """
    text, num_steps = known_texts.texts[index], len(run.tokens) - 1
    num_usable = num_steps if run.finish_reason == "stop" else max(num_steps - run.block_size + 1, 0)
    num = min(num_samples, num_usable)
    first = random.Random(text.sampling.seed).randint(0, num_usable - num)
    steps = list(range(first, first + num))
    positions = torch.tensor(steps, dtype=torch.int64, device=known_texts.tokens.device) + text.num_prompt_tokens
    embeddings = pair.target.get_input_embeddings()(known_texts.tokens[index, positions])
    vectors = _float16(known_texts.context[index, positions - 1]), _float16(embeddings)
    if not steps:
        return _Steps(steps, *vectors)
    choices = choices_at(pair, known_texts.rows(torch.tensor([index])), positions, NUM_CHOICES)
    ranks, nodes = (b"" if ints is None else ints.cpu().numpy().tobytes() for ints in (choices.ranks, choices.nodes))
    matches = _matches(text.tokens, positions.tolist())
    return _Steps(steps, *vectors, ranks, _float16(choices.scores), _float16(choices.log_probs), nodes, matches)


def _matches(tokens: Sequence[int], positions: Sequence[int]) -> bytes:
    """`step_matches` of a text at consecutive positions."""
    if not has_functions():
        return b""
    index, matches, length = TextIndex(1, len(tokens)), np.zeros((len(positions), 2), np.uint8), 0
    for i, position in enumerate(positions):
        match = index.match([0], [tokens[length : position + 1]], MAX_DEPTH)
        length = position + 1
        if match is None:
            continue
        continuation = match.paths[0, : match.sizes[0]].tolist()
        pairs = zip(continuation, tokens[position + 1 :], strict=False)
        matches[i] = match.known[0, 0], sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return matches.tobytes()


def _float16(values: Tensor) -> bytes:
    return values.detach().to("cpu", torch.float16).numpy().astype("<f2").tobytes()
