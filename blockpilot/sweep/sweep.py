"""How many tokens a step every block size gives on a prompt: tau per candidate.

A replay decodes each prompt once and walks the finished text with every candidate. Decoding with each of them is
2k + 1 times as much work, and is what the replay is tested against. The keyed sampler makes the text the same
for every candidate (exactly so in float32), so they are compared on equal terms.
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
from blockpilot.sweep.candidates import Method, check_candidates
from blockpilot.sweep.replay import KnownTexts, Text, accepted_everywhere, know, offers_at, walk
from blockpilot.sweep.rows import MIN_PROB, NUM_CHOICES, Outcome, Reject, SweepRow, prompt_ids
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import Prefill, Request, Sampling, Step


def sampler_seed(seed: int, prompt_id: str) -> int:
    """The seed one prompt is sampled with, by every candidate; other prompts draw unrelated noise."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


class _Steps(NamedTuple):
    """What is known before some of the steps of a text; the columns of a row."""

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
    """One prompt under one candidate: its text, the tokens that each verify step emitted, and if the sweep is dense
    the drafts accepted at every anchor.
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
    """One turn of a prompt of a sweep; `later_ids` are those of the turns to come."""

    prompt_id: str
    prompt: Prompt
    sampling: Sampling
    later_ids: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    error: str = ""

    def rejects(self, error: str) -> list[Reject]:
        """This turn and those that would follow it."""
        reject = Reject(self.prompt_id, self.prompt.set, self.prompt.text, error)
        return [reject, *(reject._replace(prompt_id=i, error=f"an earlier turn: {error}") for i in self.later_ids)]

    def text(self, answer: CandidateRun, max_new_tokens: int, max_length: int) -> Text:
        limit = min(len(self.prompt_ids) + max_new_tokens, max_length)
        return Text((*self.prompt_ids, *answer.tokens), len(self.prompt_ids), limit, self.sampling)

    def row(self, runs: Sequence[CandidateRun]) -> SweepRow:
        prefill = runs[-1].prefill  # the widest candidate: if any drafts and shows the context vector, it does
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
"""A run for every candidate, or why there is none."""


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
    """What each verify step of every prompt emits with every candidate block size, by one of three methods.

    `decode` really decodes with each candidate. `replay` gives the same out of one decoding of every prompt and draft
    passes over its text; the draft's context is kept for `num_slots` prompts at a time. `dense` drafts at every
    position of the text, not only where a decoding passes, about tau times the work, and puts what is accepted there
    into the rows; and for `step_samples` positions in a row what is known before the step.

    `text_block_size` decodes the text of a replay, which is the same with any: by default 1 on a CPU, where a full
    batch makes wide steps dear, and the draft's trained one on a GPU, where they cost little more than narrow ones.

    A prompt's follow-ups are asked after its answers: a row for every turn. What cannot be swept (empty, longer than
    the context, finished by its prefill) becomes a reject, with the turns that would follow, and leaves the other
    prompts alone. Raises ValueError for settings that are wrong whatever the prompt, and for a pair without a draft.
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
    """Rows and rejects prompt by prompt; the work goes turn by turn, all prompts at once."""
    of_prompts = [Outcome([], []) for _ in prompts]
    ids = [prompt_ids(prompt, sampling.seed, sampling.temperature) for prompt in prompts]
    jobs = {i: _turn(tokenizer, prompt, ids[i], sampling) for i, prompt in enumerate(prompts)}
    while jobs:
        results = run(list(jobs.values()))
        following = {}
        for (i, job), runs in zip(jobs.items(), results, strict=True):
            if isinstance(runs, str):
                of_prompts[i].rejects.extend(job.rejects(runs))
            elif not all(run.emitted for run in runs):
                of_prompts[i].rejects.extend(job.rejects("no verify step: the answer ended with its prefill"))
            else:
                of_prompts[i].rows.append(job.row(runs))
                if job.later_ids:
                    answer = tokenizer.decode(runs[0].tokens, skip_special_tokens=True)
                    following[i] = _turn(tokenizer, job.prompt.followed_up(str(answer)), job.later_ids, sampling)
        jobs = following
    return Outcome([row for of in of_prompts for row in of.rows], [r for of in of_prompts for r in of.rejects])


def _turn(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ids: tuple[str, ...], sampling: Sampling) -> SweepTurn:
    job = SweepTurn(ids[0], prompt, dataclasses.replace(sampling, seed=sampler_seed(sampling.seed, ids[0])), ids[1:])
    try:
        return dataclasses.replace(job, prompt_ids=prompt.encode(tokenizer))
    except ValueError as error:
        return dataclasses.replace(job, error=str(error))


def _decode(
    pair: Pair, candidates: Sequence[int], max_new_tokens: int, num_slots: int, jobs: Sequence[SweepTurn]
) -> list[Runs]:
    """For every job its finished runs in the order of the candidates, or why it cannot be run."""
    fitting = [len(job.prompt_ids) for job in jobs if len(job.prompt_ids) < pair.max_length]
    max_length = min(max(fitting, default=1) + max_new_tokens, pair.max_length)
    engine = Engine(pair, num_slots=num_slots, max_length=max_length, max_block_size=candidates[-1])
    limits = EngineLimits(pair.max_length, pair.max_length, candidates[-1], pair.vocab_size)  # not of these prompts
    results: list[Runs] = [job.error or [CandidateRun(size) for size in candidates] for job in jobs]
    running: dict[int, CandidateRun] = {}
    # Candidate by candidate, not prompt by prompt: a step is as wide as its widest row.
    for place, block_size in enumerate(candidates):
        for index, job in enumerate(jobs):
            runs = results[index]
            if isinstance(runs, str):
                continue
            request = Request(job.prompt_ids, max_new_tokens, job.sampling, block_size, pair.stop_token_ids)
            try:
                limits.check(request)
                running[engine.add(request)] = runs[place]
            except ValueError as error:
                results[index] = str(error)
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
    jobs: Sequence[SweepTurn],
) -> list[Runs]:
    """What `_decode` gives, from one decoding."""
    if list(candidates) == [1]:
        return _decode(pair, candidates, max_new_tokens, num_slots, jobs)
    results = _decode(pair, [text_block_size], max_new_tokens, num_slots, jobs)
    answers = {i: runs[0] for i, runs in enumerate(results) if not isinstance(runs, str) and runs[0].emitted}
    texts = {i: jobs[i].text(answer, max_new_tokens, pair.max_length) for i, answer in answers.items()}
    by_length = sorted(texts, key=lambda i: len(texts[i].tokens))
    for start in range(0, len(by_length), num_slots):
        group = by_length[start : start + num_slots]
        known = know(pair, [texts[i] for i in group])
        found = _replay_group(pair, known, [answers[i] for i in group], candidates, dense)
        for place, (i, runs) in enumerate(zip(group, found, strict=True)):
            if dense:
                runs[-1].steps = _known_before_steps(pair, known, place, runs[-1], step_samples)
            results[i] = runs
    return results


def _replay_group(
    pair: Pair, known: KnownTexts, answers: Sequence[CandidateRun], candidates: Sequence[int], dense: bool
) -> Iterator[list[CandidateRun]]:
    """The runs of every candidate on each text, decoded as `answers`."""
    drafting = [size for size in candidates if size > 1]
    if dense:
        accepted = list(zip(*(accepted_everywhere(pair, known, size) for size in drafting), strict=True))
        emitted = [list(map(emitted_along, of_text)) for of_text in accepted]
    else:
        accepted = [([],) * len(drafting) for _ in answers]
        emitted = walk(pair, known, drafting)
    for answer, context, of_text, there in zip(answers, known.prefill_context, emitted, accepted, strict=True):
        assert answer.prefill is not None
        prefill = answer.prefill._replace(context=context.float())
        num_steps = len(answer.tokens) - 1  # of plain decoding
        counts = {1: ([1] * num_steps, [0] * num_steps * dense)}
        counts |= zip(drafting, zip(of_text, there, strict=True), strict=True)
        yield [
            dataclasses.replace(answer, block_size=size, prefill=prefill, emitted=steps, accepted=right)
            for size, (steps, right) in counts.items()
            if size in candidates
        ]


def _known_before_steps(pair: Pair, known: KnownTexts, place: int, widest: CandidateRun, num_samples: int) -> _Steps:
    """Context vector and anchor of some steps in a row; none of those that the limit of the text cuts short."""
    text, num_steps = known.texts[place], len(widest.tokens) - 1
    usable = num_steps if widest.finish_reason == "stop" else max(num_steps - widest.block_size + 1, 0)
    num = min(num_samples, usable)
    first = random.Random(text.sampling.seed).randint(0, usable - num)
    places = list(range(first, first + num))
    positions = torch.tensor(places, dtype=torch.int64, device=known.tokens.device) + text.num_prompt_tokens
    embeddings = pair.target.get_input_embeddings()(known.tokens[place, positions])
    vectors = _float16(known.context[place, positions - 1]), _float16(embeddings)
    if not places:
        return _Steps(places, *vectors)
    offers = offers_at(pair, known.rows(torch.tensor([place])), positions, NUM_CHOICES)
    ranks, nodes = (b"" if each is None else each.cpu().numpy().tobytes() for each in (offers.ranks, offers.nodes))
    matches = _matches(text.tokens, positions.tolist())
    return _Steps(places, *vectors, ranks, _float16(offers.scores), _float16(offers.log_probs), nodes, matches)


def _matches(tokens: Sequence[int], places: Sequence[int]) -> bytes:
    """`step_matches` of a text at these consecutive places."""
    if not has_functions():
        return b""
    index, only, found = TextIndex(1, len(tokens)), np.zeros(1, dtype=np.int64), np.zeros((len(places), 2), np.uint8)
    index.extend(only, [tokens[: places[0]]])
    for i, place in enumerate(places):
        index.extend(only, [tokens[place : place + 1]])
        match = index.match(only, MAX_DEPTH)
        path = match.paths[0, : match.sizes[0]].tolist()
        pairs = zip(path, tokens[place + 1 :], strict=False)
        found[i] = match.known[0, 0], sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return found.tobytes()


def _float16(values: Tensor) -> bytes:
    return values.detach().to("cpu", torch.float16).numpy().astype("<f2").tobytes()
