"""The batched decoding engine: requests share one batch of slots, each with its own block size.

A step drafts a block for every row, lets the target score all blocks in one pass, and commits what the keyed sampler
confirms (verify.py). Rows have their own lengths, block sizes, seeds and limits. The target sees the blocks side by
side without padding (packing.py), and the prompts of new requests beside them; the draft sees only the blocks of rows
that draft: a wide block costs its own tokens, not everybody's. Block size 1 is plain autoregressive decoding through
the same code.

State of a row: `tokens` are final; the target's cache holds all but the last one, the anchor; the draft's cache holds
the projected context of the same positions.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.control.choose import choose
from blockpilot.control.price import StepCosts
from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.sampling import count_accepted, keyed_sample
from blockpilot.models.packing import Packing, SideBySide
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.types import (
    MAX_BLOCK_SIZE,
    FinishReason,
    Forecast,
    Policy,
    Prefill,
    Reader,
    Request,
    Sampling,
    Step,
    StepShape,
    TokenLogprobs,
)

MAX_PREFILL_TOKENS = 8192  # of prompts in one step, unless told otherwise
MAX_PENDING = 8  # plain steps that the draft's cache is filled with together


@dataclass(eq=False)
class _Row:
    request_id: int
    request: Request
    limit: int
    tokens: list[int]
    text: TextStream | None
    num_cached: int = 0  # prompt tokens that went through the target, until all have
    block_size: int = 0  # until it is decided
    forecast: Forecast | None = None
    drafts: bool = True  # the draft knows its context
    finished: bool = False

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def next_block_size(self) -> int:
        return min(self.block_size, self.limit - len(self.tokens))


class _Part(NamedTuple):
    """Rows in slots that follow each other, and what of them goes through the target: tokens [N], packed."""

    rows: list[_Row]
    packing: Packing
    tokens: Tensor


class _Known(NamedTuple):
    """What the draft is to know of some tokens, and where its cache keeps it.

    values [1, N, ...] are the target's features, or the context vectors that the draft makes of them.
    """

    values: Tensor
    slots: Tensor  # [1, N]
    positions: Tensor  # [1, N]


class Engine:
    """Continuous batch of up to `num_slots` requests of at most `max_length` tokens (prompt and output).

    Not thread-safe: one caller adds, cancels and steps. `policy` and `costs` may be replaced between steps. Costs
    are what a policy's forecasts are weighed with, by default those that it carries; without any, steps cost alike.
    `last_shape` tells what the last step took in. While `resting`, what a policy could choose for decodes plainly,
    and such requests never draft later: what the draft would have to know of them is left out. A step takes in
    `max_prefill_tokens` tokens of prompts at most, so a long prompt takes several steps, and requests that decode
    go on meanwhile.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        num_slots: int = 8,
        max_length: int = 2048,
        policy: Policy | None = None,
        costs: StepCosts | None = None,
        max_block_size: int = MAX_BLOCK_SIZE,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ) -> None:
        for name, value in (("num_slots", num_slots), ("max_prefill_tokens", max_prefill_tokens)):
            if value < 1:
                raise ValueError(f"{name} {value}: must be at least 1")
        if not 2 <= max_length <= pair.max_length:
            raise ValueError(f"max_length {max_length}: must be 2 to {pair.max_length}, the target's context")
        self.pair = pair
        self.policy = policy
        self.costs: StepCosts | None = getattr(policy, "costs", None) if costs is None else costs
        self.num_slots, self.max_length, self.max_block_size = num_slots, max_length, max_block_size
        self.max_prefill_tokens = max_prefill_tokens
        self._target = Target(pair.target, pair.draft.options.target_layer_ids)
        self._draft = pair.draft
        self._device = pair.target.device
        self._target_cache = self._target.new_cache(num_slots, max_length)
        self._draft_cache = self._draft.new_cache(num_slots, max_length)
        self._rows: list[_Row] = []  # those that decode, by slot
        self._partial: _Row | None = None  # one whose prompt is taken in, in the slot after theirs
        self._waiting: deque[_Row] = deque()
        self._pending: list[_Known] = []
        self._next_id = 0
        self.resting = False
        self.last_shape = StepShape()

    @property
    def num_active(self) -> int:
        """Requests that hold a slot."""
        return len(self._rows) + (self._partial is not None)

    @property
    def num_decoding(self) -> int:
        """Requests whose prompts are through: the rows that the next step chooses block sizes for."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self.num_active and not self._waiting

    @property
    def cache_bytes(self) -> int:
        """Memory of both caches; fixed for the engine's life."""
        return self._target_cache.num_bytes + self._draft_cache.num_bytes

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that this engine cannot serve."""
        num_prompt_tokens = len(request.prompt_ids)
        if num_prompt_tokens == 0:
            raise ValueError("prompt is empty: at least 1 token is needed")
        if num_prompt_tokens >= self.max_length:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens: at most {self.max_length - 1} leave room for an answer"
            )
        outside = [t for t in request.prompt_ids if not 0 <= t < self.pair.vocab_size]
        if outside:
            raise ValueError(f"prompt token {outside[0]}: must be 0 to {self.pair.vocab_size - 1}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {request.max_new_tokens}: must be at least 1")
        if request.num_logprobs is not None and not 0 <= request.num_logprobs <= self.pair.vocab_size:
            raise ValueError(f"num_logprobs {request.num_logprobs}: must be 0 to {self.pair.vocab_size}")
        if request.block_size is not None:
            self._check_block_size(request.block_size, "block_size")

    def add(self, request: Request) -> int:
        """Queue a request; returns the id that its steps carry. Raises ValueError as `check` does."""
        self.check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        text = TextStream(self.pair.tokenizer, request.stop_strings) if request.stop_strings else None
        limit = min(len(request.prompt_ids) + request.max_new_tokens, self.max_length)
        size = request.block_size
        row = _Row(request_id, request, limit, list(request.prompt_ids), text, block_size=size or 0, drafts=size != 1)
        self._waiting.append(row)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its slot; unknown and finished ids are ignored."""
        self._waiting = deque(row for row in self._waiting if row.request_id != request_id)
        if self._partial is not None and self._partial.request_id == request_id:
            self._partial = None
        for row in self._rows:
            row.finished |= row.request_id == request_id
        self._retire()

    def set_block_size(self, request_id: int, block_size: int) -> None:
        """From the next step on, verify blocks of this size for a request that holds a slot.

        Raises ValueError for a size out of range, for an id without a slot, and for a request that was added with
        block size 1 or went through a rest: the draft has not seen its context.
        """
        self._check_block_size(block_size, "block_size")
        row = next((row for row in self._rows if row.request_id == request_id), None)
        if row is None:
            raise ValueError(f"request {request_id}: holds no slot")
        if block_size > 1 and not row.drafts:
            raise ValueError(f"request {request_id}: decodes plainly and cannot draft any more")
        row.block_size, row.forecast = block_size, None

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """Advance every row that decodes by one block and take in prompts, as many tokens as one step may.

        Blocks and prompts go through the target in one pass, whose weights are read once for all.
        """
        blocks, prompts = self._next_blocks(), self._next_prompts()
        self.last_shape = self._shape(blocks, prompts)
        parts = [part for part in (blocks, prompts) if part is not None]
        if not parts:
            return []
        hidden, features = self._score(parts)
        contexts = None
        if features is not None:
            contexts = self._take_in(features, can_wait=prompts is None and parts[0].packing.width == 1)
        num_blocks = 0 if blocks is None else blocks.packing.num_tokens
        through, read = list[_Row](), hidden[:num_blocks]
        if prompts is not None:
            through, places = self._advance(prompts)
            last = [num_blocks + place for place in places]
            read = torch.cat([read, hidden[last]])
        logits = self._target.logits(read)
        steps = []
        if blocks is not None:
            steps += self._confirm(blocks, logits[:num_blocks], contexts)
        if through:
            last_contexts = None if contexts is None else contexts[last].float()
            steps += self._begin(through, logits[num_blocks:].float(), last_contexts)
        self._retire()
        return steps

    def _shape(self, blocks: _Part | None, prompts: _Part | None) -> StepShape:
        num_prompt_tokens = 0 if prompts is None else prompts.packing.num_tokens
        if blocks is None:
            return StepShape(num_prompt_tokens=num_prompt_tokens)
        num_chosen = sum(row.forecast is not None for row in blocks.rows)
        return StepShape(blocks.packing.sizes, num_prompt_tokens, num_chosen)

    def _next_blocks(self) -> _Part | None:
        """Anchors and drafted tokens of the rows that decode, for the size that each has in this step."""
        if not self._rows:
            return None
        self._choose()
        rows = list(self._rows)
        packing = Packing([row.next_block_size for row in rows], [row.anchor_position for row in rows], self._device)
        tokens = self._tensor([row.tokens[-1] for row in rows])[packing.rows]
        if packing.width > 1:
            self._catch_up()
            self._draft_into(tokens, packing)
        return _Part(rows, packing, tokens)

    def _next_prompts(self) -> _Part | None:
        """Prompts in order, of which the last may fit one step in part only."""
        rows = [] if self._partial is None else [self._partial]
        left = self.max_prefill_tokens - sum(len(row.tokens) - row.num_cached for row in rows)
        while self._waiting and left > 0 and len(self._rows) + len(rows) < self.num_slots:
            rows.append(self._waiting.popleft())
            left -= len(rows[-1].tokens)
        if not rows:
            return None
        self._let_rest(rows)
        sizes = [len(row.tokens) - row.num_cached for row in rows]
        sizes[-1] += min(left, 0)
        packing = Packing(sizes, [row.num_cached for row in rows], self._device)
        tokens = [t for row, n in zip(rows, sizes, strict=True) for t in row.tokens[row.num_cached :][:n]]
        return _Part(rows, packing, self._tensor(tokens))

    def _score(self, parts: Sequence[_Part]) -> tuple[Tensor, _Known | None]:
        """Run tokens of rows, whose slots follow each other from the first on, through the target.

        Returns hidden [N, hidden], and the features where some row drafts.
        """
        together = SideBySide([part.packing for part in parts])
        rows = [row for part in parts for row in part.rows]
        slots, positions = together.rows[None], together.positions[None]
        view = self._target_cache.view(slots, positions, slice(0, len(rows)), together.length)
        tokens = torch.cat([part.tokens for part in parts])[None]
        drafts = any(row.drafts for row in rows)
        scored = self._target.score(tokens, positions, view, features=drafts, packing=together)
        features = None if scored.features is None else _Known(scored.features, slots, positions)
        return scored.hidden[0], features

    def _advance(self, prompts: _Part) -> tuple[list[_Row], list[int]]:
        """Note what of the prompts is cached now; returns rows that are through, and their last tokens' places."""
        self._partial = None
        sizes = prompts.packing.sizes
        for row, size in zip(prompts.rows, sizes, strict=True):
            row.num_cached += size
        last = [first + size - 1 for first, size in zip(prompts.packing.firsts, sizes, strict=True)]
        if prompts.rows[-1].num_cached == len(prompts.rows[-1].tokens):
            return prompts.rows, last
        self._partial = prompts.rows[-1]
        return prompts.rows[:-1], last[:-1]

    def _begin(self, rows: list[_Row], logits: Tensor, contexts: Tensor | None) -> list[Step]:
        """First tokens, and decisions of the policy, for rows whose prompts are through and that decode from now on.

        logits [R, vocab] and the context vectors [R, draft hidden] are those of the last prompt tokens.
        """
        self._rows += rows
        lengths = [len(row.tokens) for row in rows]
        chosen = keyed_sample(logits, lengths, [row.request.sampling for row in rows]).tolist()
        anchors = self._target.embed(self._tensor(chosen))
        steps = []
        for i, row in enumerate(rows):
            prefill = Prefill(logits[i], None, lengths[i], row.request.sampling.temperature)
            if contexts is not None and row.drafts:
                prefill = prefill._replace(context=contexts[i], anchor=anchors[i])
            self._decide(row, prefill)
            step = _commit(row, [chosen[i]], 0, 0, prefill)
            steps.append(_with_logprobs(step, row, logits[i : i + 1]))
        return steps

    def _decide(self, row: _Row, prefill: Prefill) -> None:
        """Set the block size of a row for good, or the forecast to choose from at every step, unless it is known."""
        if row.block_size:
            return
        policy = row.request.policy or self.policy
        decided = self.pair.block_size if policy is None else policy(prefill)
        if isinstance(decided, int):
            self._check_block_size(decided, "the policy's block size")
            row.block_size = decided
        else:
            self._check_block_size(decided.candidates[-1], "the policy's largest block size")
            row.forecast = decided

    def _choose(self) -> None:
        """Set the block sizes of this step for the rows that have a forecast."""
        self._let_rest(self._rows)
        forecasts = [row.forecast for row in self._rows if row.forecast is not None]
        if not forecasts:
            return
        others = [row.next_block_size for row in self._rows if row.forecast is None]
        chosen = iter(choose(forecasts, self.costs, others))
        for row in self._rows:
            if row.forecast is not None:
                row.block_size = next(chosen)

    def _let_rest(self, rows: Sequence[_Row]) -> None:
        """While resting, give up drafting for rows that a policy may choose for."""
        for row in rows if self.resting else ():
            if row.forecast is not None or not row.block_size:
                row.drafts, row.forecast, row.block_size = False, None, 1

    def _read(self, contexts: Tensor, last: list[int]) -> None:
        """Let policies that read every step see what the next starts from: contexts [N, hidden] of this one.

        last [R] is the place of each row's last final token among them.
        """
        readers: dict[Reader, list[int]] = {}
        for i, row in enumerate(self._rows):
            if row.forecast is not None and row.forecast.reader is not None and not row.finished:
                readers.setdefault(row.forecast.reader, []).append(i)
        for reader, index in readers.items():
            before = contexts[[last[i] for i in index]]
            anchors = self._target.embed(self._tensor([self._rows[i].tokens[-1] for i in index]))
            reader.read([self._rows[i].forecast for i in index], before, anchors)

    def _confirm(self, blocks: _Part, logits: Tensor, contexts: Tensor | None) -> list[Step]:
        """Commit of every block what the target confirms: logits [N, vocab] of the blocks' tokens.

        contexts [N or more, draft hidden] begin with the tokens' context vectors.
        """
        packing = blocks.packing
        chosen = self._draw(logits, [range(1, size + 1) for size in packing.sizes]).tolist()
        drafted = blocks.tokens.tolist()
        steps = []
        for row, first, size, scored in zip(
            blocks.rows, packing.firsts, packing.sizes, logits.split(packing.sizes), strict=True
        ):
            step = _verify(row, drafted[first + 1 : first + size], chosen[first : first + size])
            steps.append(_with_logprobs(step, row, scored))
        if contexts is not None:
            last = [first + step.num_accepted for first, step in zip(packing.firsts, steps, strict=True)]
            self._read(contexts, last)
        return steps

    def _draft_into(self, tokens: Tensor, packing: Packing) -> None:
        """Put the draft's tokens into the slots 1 .. of the packed blocks [N], in place."""
        drafting = [slot for slot, size in enumerate(packing.sizes) if size > 1]
        blocks = packing
        if len(drafting) < len(self._rows):
            starts = [self._rows[slot].anchor_position for slot in drafting]
            blocks = Packing([packing.sizes[slot] for slot in drafting], starts, self._device)
        slots, positions = self._tensor(drafting), blocks.positions[None]
        rows = slice(0, len(drafting)) if blocks is packing else slots
        view = self._draft_cache.view(slots[blocks.rows][None], positions, rows, blocks.length)
        anchors = self._tensor([self._rows[slot].tokens[-1] for slot in drafting])[blocks.rows]
        block = torch.where(blocks.offsets == 0, anchors, self._draft.options.mask_token_id)
        embedded = self._target.embed(block).to(self._draft.dtype)
        hidden = self._draft.propose(embedded[None], positions, view, blocks)[0]
        logits = self._target.logits(hidden[_drafts(blocks, self._device)])
        tokens[_drafts(packing, self._device)] = self._draw(logits, [range(1, size) for size in packing.sizes])

    def _draw(self, logits: Tensor, offsets: Sequence[range]) -> Tensor:
        """Tokens [M] drawn from logits [M, vocab], each so far after its row's anchor as `offsets` [R] list.

        Draft and target draw a position's token with the same key: where their distributions agree, so do the tokens,
        at any temperature (coupling by shared randomness, arXiv 2408.07978).
        """
        positions, sampling = [], []
        for row, listed in zip(self._rows, offsets, strict=True):
            positions += [row.anchor_position + offset for offset in listed]
            sampling += [row.request.sampling] * len(listed)
        return keyed_sample(logits, positions, sampling)

    def _take_in(self, features: _Known, can_wait: bool) -> Tensor:
        """Give the draft what it will know of this step; returns the context vectors [N, hidden].

        Where nothing is drafted its cache can wait, and is cheaper to fill with several steps together.
        """
        known = features._replace(values=self._draft.fuse(features.values.to(self._draft.dtype)))
        self._pending.append(known)
        if not can_wait or len(self._pending) >= min(MAX_PENDING, len(self._rows)):
            self._catch_up()
        return known.values[0]

    def _catch_up(self) -> None:
        """Give the draft all that was put off."""
        if self._pending:
            together = _Known(*(torch.cat(parts, dim=1) for parts in zip(*self._pending, strict=True)))
            self._pending.clear()
            view = self._draft_cache.view(together.slots, together.positions, slice(0, 0), 0)
            self._draft.extend(together.values, together.positions, view)

    def _retire(self) -> None:
        """Drop finished rows, keeping slots dense: the last row moves into each hole."""
        if any(row.finished for row in self._rows):
            self._catch_up()
        before = len(self._rows)
        for slot in reversed(range(before)):
            if not self._rows[slot].finished:
                continue
            last = self._rows.pop()
            if slot < len(self._rows):
                self._move(len(self._rows), slot, len(last.tokens))
                self._rows[slot] = last
        if self._partial is not None and len(self._rows) < before:
            self._move(before, len(self._rows), self._partial.num_cached)

    def _move(self, source: int, destination: int, length: int) -> None:
        for cache in (self._target_cache, self._draft_cache):
            cache.move(source, destination, length)

    def _check_block_size(self, block_size: int, name: str) -> None:
        if not 1 <= block_size <= self.max_block_size:
            raise ValueError(f"{name} {block_size}: must be 1 to {self.max_block_size}")

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _drafts(packing: Packing, device: torch.device) -> Tensor:
    """Where the drafted tokens of packed blocks lie: all but the anchors."""
    places = (range(first + 1, first + size) for first, size in zip(packing.firsts, packing.sizes, strict=True))
    return torch.tensor([place for of_block in places for place in of_block], device=device)


def _verify(row: _Row, drafted: list[int], chosen: list[int]) -> Step:
    """Emit the accepted prefix of `drafted` and the bonus token; both are the target's own choices."""
    block_size, num_accepted = len(chosen), count_accepted(drafted, chosen)
    if row.forecast is not None:
        row.forecast.observe(block_size, num_accepted)
    return _commit(row, chosen[: num_accepted + 1], block_size, num_accepted, None)


def _commit(row: _Row, tokens: list[int], block_size: int, num_accepted: int, prefill: Prefill | None) -> Step:
    """Append tokens up to the first that ends the request."""
    emitted: list[int] = []
    reason: FinishReason | None = None
    for token in tokens:
        row.tokens.append(token)
        emitted.append(token)
        if _stops(row, token):
            reason = "stop"
            break
    if reason is None and len(row.tokens) >= row.limit:
        reason = "length"
    row.finished = reason is not None
    return Step(row.request_id, tuple(emitted), block_size, min(num_accepted, len(emitted)), reason, prefill)


def _with_logprobs(step: Step, row: _Row, logits: Tensor) -> Step:
    """The step with log probabilities, if its request wants them; logits [n, vocab] begin with its first token's."""
    num = row.request.num_logprobs
    if num is None:
        return step
    scores = logits[: len(step.tokens)].float().log_softmax(dim=-1)
    of_tokens = scores.gather(1, torch.tensor(step.tokens, device=scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(num, dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    likeliest = (tuple(zip(tokens, values, strict=True)) for tokens, values in pairs)
    return replace(step, logprobs=tuple(map(TokenLogprobs, of_tokens, likeliest)))


def _stops(row: _Row, token: int) -> bool:
    if token in row.request.stop_token_ids:
        return True
    if row.text is None:
        return False
    row.text.push([token])
    return row.text.stopped


def cache_bytes(pair: Pair, num_slots: int, max_length: int) -> int:
    """Memory of the caches of an engine of this size, by those of one slot with one token."""
    one = Target(pair.target, pair.draft.options.target_layer_ids).new_cache(1, 1), pair.draft.new_cache(1, 1)
    return num_slots * max_length * sum(cache.num_bytes for cache in one)


def generate(
    pair: Pair,
    prompt_ids: Sequence[int],
    *,
    block_size: int | None = None,
    policy: Policy | None = None,
    costs: StepCosts | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_token_ids: frozenset[int] | None = None,
    stop_strings: tuple[str, ...] = (),
) -> Iterator[Step]:
    """Decode one prompt, yielding every step. Without a block size or policy, the draft's trained block size."""
    request = Request(
        tuple(prompt_ids),
        max_new_tokens,
        Sampling(temperature, top_p, top_k, seed),
        block_size,
        pair.stop_token_ids if stop_token_ids is None else stop_token_ids,
        stop_strings,
    )
    max_length = max(2, min(len(request.prompt_ids) + max_new_tokens, pair.max_length))
    engine = Engine(pair, num_slots=1, max_length=max_length, policy=policy, costs=costs)
    engine.add(request)
    while not engine.idle:
        yield from engine.step()
