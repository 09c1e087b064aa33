"""The batched decoding engine: requests share one batch of slots, each with a separate block size.

A step drafts tokens for the rows, scores all blocks in one pass of the target, and commits the drafted tokens that
equal the target's choices (sampling.py), and one bonus token per row. Blocks and the prompts of new requests are
flattened into one pass without padding (models/packing.py). Block size 1 is plain autoregressive decoding through the
same code. The controller (control/controller.py) chooses what is drafted and verified.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from blockpilot.control.acceptance import UNTRAINED, AcceptanceModel, Prior
from blockpilot.control.controller import Controller
from blockpilot.control.cost import NOMINAL
from blockpilot.engine.batch import Batch
from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.drafting import Drafter, Proposer
from blockpilot.engine.drawing import choose_tokens
from blockpilot.engine.limits import EngineLimits, at_least_one
from blockpilot.engine.lookup import Lookup
from blockpilot.engine.penalties import LogitsProcessor
from blockpilot.engine.prefixes import Prefixes
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH
from blockpilot.models.graphs import Graphs
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from blockpilot.types import MAX_BLOCK_SIZE, Policy, Prefill, Request, Step

MAX_LENGTH = 2048  # default of max_length
MAX_PREFILL_TOKENS = 8192
WITH_STATES = "the target has recurrent states, which pages of keys and graphs do not hold"
MAX_PENDING = 64  # accepted tokens of a row that are not in the draft's cache yet

_logger = logging.getLogger(__name__)


class Engine:
    """Continuous batch of requests: `add` them, then `step` until `idle`. Not thread-safe: use it from one thread.

    num_slots: requests that decode together; others wait. max_length: maximum tokens of a prompt and its answer, by
    default 2,048 or the target's context. All KV caches are allocated at the start (`cache_bytes`).
    controller: chooses at every step what is drafted and verified; may be replaced between steps. policy: the prior
    of its acceptance model, or a function that fixes each request's block size after its prefill.
    max_block_size: maximum block size of any request.
    max_prefill_tokens: maximum prompt tokens in a step (chunked prefill); decoding requests continue in that step.
    prefix_tokens: capacity of the prefix cache in tokens (prefixes.py). graphs: on a GPU, run steps of few tokens by
    CUDA graphs (models/graphs.py). A target with recurrent states supports neither (`switched_off`).

    Raises ValueError for an invalid size, and for a prior beside a controller. If `on_failure` is set, an error in
    one request ends only that request, and `on_failure` is called with the request's id and the error; otherwise the
    step raises it. After a step that raised, the engine continues: the prompts of that step wait again.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        num_slots: int = 8,
        max_length: int | None = None,
        policy: Policy | Prior | None = None,
        controller: Controller | None = None,
        max_block_size: int = MAX_BLOCK_SIZE,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        prefix_tokens: int = 0,
        graphs: bool = True,
    ) -> None:
        at_least_one(num_slots=num_slots, max_prefill_tokens=max_prefill_tokens, max_block_size=max_block_size)
        max_length = min(MAX_LENGTH, pair.max_length) if max_length is None else max_length
        if not 2 <= max_length <= pair.max_length:
            raise ValueError(f"max_length {max_length}: must be 2 to {pair.max_length}, the target's context")
        if isinstance(policy, Prior) and controller is not None:
            raise ValueError("policy: the prior of a controller's model is given to its AcceptanceModel")
        prior, self.policy = (policy, None) if isinstance(policy, Prior) else (UNTRAINED, policy)
        model = AcceptanceModel(min(pair.block_size - 1, MAX_DEPTH), prior)
        self.controller = controller or Controller(model, replace(NOMINAL, is_sequential=pair.draft.is_sequential))
        self.pair = pair
        self.num_slots, self.max_length, self.max_block_size = num_slots, max_length, max_block_size
        self.max_prefill_tokens = max_prefill_tokens
        self._limits = EngineLimits(max_length, pair.max_length, max_block_size, pair.vocab_size, pair.has_draft)
        self.on_failure: Callable[[int, Exception], None] | None = None
        self._device = pair.target.device
        self._target = Target(pair.target, pair.layer_ids)
        self.exactness = self._target.exactness  # "bit for bit" or "up to rounding", and the reason
        self._cache = self._target.new_cache(num_slots, max_length, num_spare=max_block_size)
        self.switched_off = {name: WITH_STATES for name in ("prefix cache", "CUDA graphs") if self._target.has_states}
        """Parts of the engine that this target cannot use, with the reason."""
        if self._target.has_states and prefix_tokens > 0:
            _logger.warning("prefix_tokens %d: prefix cache off, %s", prefix_tokens, WITH_STATES)
            prefix_tokens = 0
        self._drafter = Drafter(pair.prepared_draft, num_slots, max_length)
        self._lookup = Lookup(num_slots, max_length)
        self._proposer = Proposer(self._drafter, self._lookup, pair.draft, max_block_size)
        self._prefixes = Prefixes(self._cache, self._drafter.cache, prefix_tokens)
        if graphs and self._device.type == "cuda":
            self._drafter.cache.graphs = Graphs(self._device)
            self._cache.graphs = None if self._target.has_states else self._drafter.cache.graphs
        self._rows: list[Row] = []  # decoding rows, by slot
        self._partial: Row | None = None  # row in chunked prefill, in the slot after them
        self._waiting: deque[Row] = deque()
        self._next_id = 0

    def __repr__(self) -> str:
        sizes = f"num_slots={self.num_slots}, max_length={self.max_length}"
        return f"Engine({self.pair}, {sizes}, {self.num_active} active, {self.num_waiting} waiting)"

    @property
    def num_active(self) -> int:
        """Requests that hold a slot."""
        return len(self._rows) + (self._partial is not None)

    @property
    def num_decoding(self) -> int:
        """Requests whose prefill is complete."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        return not self.num_active and not self._waiting

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV caches of target and draft and of the prefix cache; constant."""
        return self._cache.num_bytes + self._drafter.cache.num_bytes + self._prefixes.num_bytes

    @property
    def num_kept_tokens(self) -> int:
        """Tokens in the prefix cache."""
        return self._prefixes.num_tokens

    def check(self, request: Request) -> None:
        """Raise ValueError for a request that this engine cannot serve."""
        self._limits.check(request)

    def add(self, request: Request) -> int:
        """Queue a request and return its id (`Step.request_id`). Raises ValueError as `check` does.

        The model's stop tokens end a request only if its `stop_token_ids` include them (`pair.stop_token_ids`).
        """
        self.check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        text = TextStream(self.pair.tokenizer, request.stop_strings) if request.stop_strings else None
        limit = min(len(request.prompt_ids) + request.max_new_tokens, self.max_length)
        row = Row(request_id, request, limit, list(request.prompt_ids), text, block_size=request.block_size)
        row.automaton = None if request.constraint is None else request.constraint.start()
        row.processor = LogitsProcessor.of(request)
        row.can_draft = self.pair.has_draft and request.block_size != 1
        self._waiting.append(row)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its slot; unknown and finished ids are ignored."""
        self._waiting = deque(row for row in self._waiting if row.request_id != request_id)
        if self._partial is not None and self._partial.request_id == request_id:
            self._clear(len(self._rows))
            self._partial = None
        for row in self._rows:
            row.finished |= row.request_id == request_id
        self._retire()

    @torch.inference_mode()
    def step(self) -> list[Step]:
        """Advance every decoding row by one block, and prefill at most `max_prefill_tokens` prompt tokens."""
        started, num_graphs = time.perf_counter(), len(self._drafter.cache.graphs or ())
        # 1. Schedule: the decoding rows, and the prompts to prefill in the same step.
        rows, prompts = list(self._rows), self._schedule()
        if not rows and not prompts:
            return []
        with self._requeued(prompts):
            # 2. Draft: the trees of candidates to verify.
            num_prompt_tokens = sum(prompts.values())
            drafts = self._proposer.propose(rows, self.controller, num_prompt_tokens)
            # 3. Score: one pass of the target over blocks and prompts.
            batch = Batch.of(rows, drafts.trees, prompts, self._device)
            logits, features = self._score(batch)
            # 4. Commit: drafted tokens that equal the target's choices are accepted.
            steps, accepted = self._commit(batch, logits, features)
        self._keep_prefixes(steps)
        self._retire()
        # 5. Learn: acceptance from the verified nodes, and the step cost unless a graph was captured in this step.
        has_captured = len(self._drafter.cache.graphs or ()) > num_graphs
        outcome = drafts.outcome(
            rows, accepted, steps, num_prompt_tokens=num_prompt_tokens, has_captured=has_captured
        )
        self.controller.learn(outcome, time.perf_counter() - started)
        return steps

    # --- schedule ---

    def _schedule(self) -> dict[Row, int]:
        """Rows to prefill, first come first served, with the prompt tokens of each; the last prompt may be split."""
        # A partly prefilled prompt continues first, in the slot after the decoding rows.
        rows = [] if self._partial is None else [self._partial]
        left = self.max_prefill_tokens - sum(row.num_uncached for row in rows)
        while self._waiting and left > 0 and len(self._rows) + len(rows) < self.num_slots:
            if self._prefixes.worth_waiting(self._waiting[0], rows):
                break  # after the prefill of the other prompt it can reuse these pages
            row = self._waiting.popleft()
            self._prefixes.reuse(row, len(self._rows) + len(rows))
            rows.append(row)
            left -= row.num_uncached
        num_tokens = {row: row.num_uncached for row in rows}
        if rows:
            num_tokens[rows[-1]] += min(left, 0)  # only the last one can exceed the limit
        return num_tokens

    @contextmanager
    def _requeued(self, prompts: Mapping[Row, int]) -> Iterator[None]:
        """If the step raises inside, rows in prefill wait again, in front of the others."""
        try:
            yield
        except Exception:
            for row in reversed([row for row in prompts if row not in self._rows]):
                row.restart()
                self._waiting.appendleft(row)
            self._partial = None
            raise

    # --- score ---

    def _score(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """One pass of the target: the logits [M, vocab] of its choices, and the features [N, F] of all tokens for the
        draft's context, None if no row may draft.
        """
        packing = batch.packing
        view = self._cache.view(packing.rows, packing.columns, slice(0, len(packing.sizes)), packing.length)
        scored = self._target.score(batch.tokens, view, packing, features=batch.may_draft)
        for row, _, span, _ in batch.prompts:
            row.note_prompt(self._target.logits, scored.hidden[span])
        return self._target.logits(batch.scored_states(scored.hidden)), scored.features

    # --- commit and retire ---

    def _commit(self, batch: Batch, logits: Tensor, features: Tensor | None) -> tuple[list[Step], list[list[int]]]:
        """Commit the accepted tokens of every block, and the first tokens of completed prompts.

        Returns the steps, and the accepted paths of the blocks.
        """
        chosen = choose_tokens(batch, logits, self._cache.graphs)
        steps, paths = self._verify(batch, logits, chosen)
        contexts = self._update_draft(batch, paths, chosen, features)
        for prompt in batch.prompts:
            prompt.row.num_cached += prompt.tokens.stop - prompt.tokens.start
            self._partial = None if prompt.is_complete else prompt.row
        if complete := batch.complete_prompts:
            num = batch.num_block_tokens
            steps += self._begin([prompt.row for prompt in complete], logits[num:].float(), chosen[num:], contexts)
        return steps, paths

    def _verify(self, batch: Batch, logits: Tensor, chosen: Sequence[int]) -> tuple[list[Step], list[list[int]]]:
        """Steps and accepted paths of the decoding rows."""
        steps, paths = [], []
        for row, tree, _, span in batch.blocks:
            path = [0]
            with self._isolated(row):
                path, step = row.verify(tree, chosen[span], logits[span])
                steps.append(step)
            paths.append(path)
        self._cache.accept(batch.packing.starts, paths)
        return steps, paths

    def _update_draft(
        self, batch: Batch, paths: Sequence[Sequence[int]], chosen: Sequence[int], features: Tensor | None
    ) -> dict[Row, Tensor]:
        """Store the features of accepted tokens for the draft, and add prompts and full buffers to its cache.

        Returns the context vector [hidden] of the last token of each completed prompt whose row may draft.
        """
        if features is None:
            return {}
        self._drafter.note(batch, paths, chosen, features)
        # Accepted tokens of blocks wait until the row drafts: one pass over many costs less than many passes.
        due = dict[int, Row]()
        for slot, block in enumerate(batch.blocks):
            if len(block.row.next_tokens) >= MAX_PENDING:
                due[slot] = block.row
        end, end_of = sum([len(row.next_tokens) for row in due.values()]), dict[Row, int]()
        for slot, prompt in enumerate(batch.prompts, len(batch.blocks)):
            row = due[slot] = prompt.row
            end += len(row.next_tokens)
            if prompt.is_complete and row.next_tokens:
                end_of[row] = end
        vectors = self._drafter.update_cache(list(due.values()), list(due))
        return {} if vectors is None else {row: vectors[end - 1] for row, end in end_of.items()}

    def _keep_prefixes(self, steps: Sequence[Step]) -> None:
        if self._prefixes.num_bytes:
            finished = {slot: row for slot, row in enumerate(self._rows) if row.finished and not row.failed}
            self._drafter.update_cache(list(finished.values()), list(finished))
            self._prefixes.keep(self._rows, steps)

    def _begin(
        self, rows: list[Row], logits: Tensor, chosen: Sequence[int], contexts: dict[Row, Tensor]
    ) -> list[Step]:
        """Emit the first tokens of rows whose prompts are complete, and fix their block sizes if there is a policy.

        logits [R, vocab] are those of the last prompt tokens, chosen [R] the tokens chosen from them.
        """
        self._rows += rows
        lengths = [len(row.tokens) for row in rows]
        steps = []
        for i, row in enumerate(rows):
            prefill = Prefill(logits[i], None, lengths[i], row.request.sampling.temperature)
            if row in contexts:
                prefill = prefill._replace(context=contexts[row].float())
            with self._isolated(row):
                step = row.commit([chosen[i]], logits[i : i + 1], [0])
                self._decide(row, prefill)
                logprobs = tuple(row.prompt_logprobs)
                steps.append(replace(step, prefill=prefill, num_reused=row.num_reused, prompt_logprobs=logprobs))
        return steps

    @contextmanager
    def _isolated(self, row: Row) -> Iterator[None]:
        """Failure isolation: with `on_failure`, an exception inside ends this row only."""
        try:
            yield
        except Exception as error:
            if self.on_failure is None:
                raise
            row.finished = row.failed = True
            self.on_failure(row.request_id, error)

    def _decide(self, row: Row, prefill: Prefill) -> None:
        """Fix a row's block size by the policy, if there is one and the request does not fix it."""
        if row.block_size is None and self.policy is not None:
            row.block_size = self.policy(prefill)
            self._limits.check_block_size(row.block_size, "the policy's block size", lookup=row.request.lookup)

    def _retire(self) -> None:
        """Drop finished rows and keep slots dense: the last row moves into each free slot."""
        before, has_failed = len(self._rows), any(row.failed for row in self._rows)
        for slot in reversed(range(before)):
            if not self._rows[slot].finished:
                continue
            self._lookup.end(self._rows[slot])
            if self._rows[slot].failed:
                self._clear(slot)
            last = self._rows.pop()
            if slot < len(self._rows):
                self._move(len(self._rows), slot, len(last.tokens))
                self._rows[slot] = last
        if self._partial is not None and len(self._rows) < before:
            self._move(before, len(self._rows), self._partial.num_cached)
        if has_failed:  # parts of its prompt may have been in other slots
            for slot in range(self.num_active, self.num_slots):
                self._clear(slot)

    def _clear(self, slot: int) -> None:
        """Clear a slot whose keys and values may not be finite: masks do not remove NaN."""
        for cache in (self._cache, self._drafter.cache):
            cache.clear(slot)

    def _move(self, source: int, destination: int, length: int) -> None:
        for cache in (self._cache, self._drafter.cache):
            cache.move(source, destination, length)
