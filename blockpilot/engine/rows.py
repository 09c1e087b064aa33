"""State of a request in the engine: its tokens, its end conditions, and the results of its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, tensor

from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.penalties import LogitsProcessor
from blockpilot.engine.sampling import NO_TOKEN
from blockpilot.engine.trees import walk
from blockpilot.types import NO_TREE, Automaton, FinishReason, Request, Step, TokenLogprobs, Tree

HEAD_ROWS = 256  # prompt tokens in one call of the LM head, for their log probabilities


@dataclass(eq=False)
class Row:
    """One sequence: prompt and accepted `tokens`; all but the last one, the anchor, are in the target's KV cache."""

    request_id: int
    request: Request
    limit: int
    """Maximum tokens of prompt and answer together."""
    tokens: list[int]
    text: TextStream | None
    """Search for stop strings; None if the request has none."""
    num_cached: int = 0
    """Prompt tokens in the target's cache, during prefill."""
    num_reused: int = 0
    """Prompt tokens that came from the prefix cache."""
    block_size: int | None = None
    """Fixed block size; None: the controller chooses at every step what is drafted and verified."""
    automaton: Automaton | None = None
    """Automaton of the request's constraint."""
    processor: LogitsProcessor | None = None
    """Penalties, bias and minimum length of the request; None if it changes no logits."""
    error: Exception | None = None
    """Error of the automaton; `commit` raises it if there is no token to choose."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """Log probabilities of the prompt's tokens so far, if requested."""
    can_draft: bool = True
    """True if the draft may run for this row; its cache then holds the tokens before the pending ones below."""
    num_draft_cached: int = 0
    """Tokens in the draft's cache."""
    features: list[Tensor] = field(default_factory=list)
    """Target features [n, F] of the pending tokens: accepted ones that are not in the draft's cache yet."""
    next_tokens: list[int] = field(default_factory=list)
    """The token after each pending token."""
    finished: bool = False
    failed: bool = False
    """The row ended with an error: its slot may hold values that are not finite."""

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that are not in the target's cache."""
        return len(self.tokens) - self.num_cached

    @property
    def adapts(self) -> bool:
        """True if the row has no fixed block size: the controller chooses."""
        return self.block_size is None

    @property
    def is_tree(self) -> bool:
        return self.request.layout == "tree" or (self.request.layout == "auto" and self.adapts)

    @property
    def looks_up(self) -> bool:
        """True if prompt lookup may propose tokens: by default if the row adapts."""
        wanted = self.adapts if self.request.lookup is None else self.request.lookup
        return wanted and self.block_size != 1

    @property
    def max_depth(self) -> int:
        """Maximum drafted tokens that the next step can accept: with the bonus token they reach the limit."""
        return self.limit - len(self.tokens) - 1

    @property
    def next_block_size(self) -> int:
        """Maximum tokens that the next step of a row of fixed block size verifies, given the limit."""
        assert self.block_size is not None
        left = self.limit - len(self.tokens)
        return self.block_size if self.is_tree and left > 1 else min(self.block_size, left)

    def draftable_depth(self, draft_depth: int) -> int:
        """Maximum positions that the draft, of maximum depth `draft_depth`, may propose tokens for in the next step.

        0 if a constraint forces all of them.
        """
        depth = max(0, min(draft_depth, self.max_depth))
        return 0 if self._is_forced(depth) else depth

    def fixed_depth(self, draft_depth: int) -> int:
        """Positions that the draft proposes tokens for in the next step of a row of fixed block size.

        At most `draft_depth` for a tree.
        """
        if not self.can_draft:
            return 0
        depth = min(self.next_block_size, self.limit - len(self.tokens)) - 1
        depth = min(depth, draft_depth) if self.is_tree else depth
        return 0 if self._is_forced(depth) else depth

    def _is_forced(self, depth: int) -> bool:
        """True if a constraint forces the next `depth` tokens, or fails: `commit` then raises its error."""
        try:
            return self.automaton is not None and len(self.automaton.forced()) >= depth
        except Exception as error:  # raised by the automaton
            self.error = self.error or error
            return True

    def verify(self, tree: Tree, chosen: Sequence[int], logits: Tensor) -> tuple[list[int], Step]:
        """The accepted path of `tree`, and the step that emits it and the bonus token.

        chosen [1 + nodes] are the target's choices after the anchor and every node, from logits [1 + nodes, vocab].
        """
        path = walk(tree, chosen)  # the last node's choice is the bonus token
        if chosen[path[-1]] == NO_TOKEN and len(path) > 1:
            path.pop()  # no token can be chosen there: the next step fails, unless the text ends before
        step = self.commit([chosen[i] for i in path], logits, path, len(chosen), tree)
        return path[: len(step.tokens)], step

    def commit(
        self, tokens: list[int], logits: Tensor, path: Sequence[int], block_size: int = 0, tree: Tree = NO_TREE
    ) -> Step:
        """Append tokens [n], chosen from logits[path], up to the first that ends the request.

        Raises FloatingPointError if the target's scores are not finite, or the row's error if it has one.
        """
        if NO_TOKEN in tokens:
            raise self.error or FloatingPointError(
                f"the target's scores after {len(self.tokens)} tokens are not finite"
            )
        # One token at a time: any of them may end the request, and the tokens after it are dropped.
        emitted, texts = list[int](), list[str]()
        reason: FinishReason | None = None
        while reason is None and len(emitted) < len(tokens):
            emitted.append(tokens[len(emitted)])
            self.tokens.append(emitted[-1])
            try:
                reason = self._end(emitted[-1], texts)
            except ValueError as error:  # of the automaton: the tokens before stay accepted, as in plain decoding
                if len(emitted) == 1:
                    raise
                self.error = error
                emitted.pop()
                self.tokens.pop()
                break
        self.finished = reason is not None
        return Step(
            self.request_id,
            tuple(emitted),
            block_size,
            num_accepted=min(len(path) - 1, len(emitted)),
            finish_reason=reason,
            logprobs=self._logprobs(emitted, logits, path),
            texts=tuple(texts),
            tree=tree,
        )

    def _end(self, token: int, texts: list[str]) -> FinishReason | None:
        """Finish reason if the token just appended ends the request; adds the token's text to `texts`."""
        reason: FinishReason | None = "length" if len(self.tokens) >= self.limit else None
        if self.automaton is not None:
            self.automaton.take(token)
            reason = "stop" if self.automaton.ends() else reason
        is_stop_token = token in self.request.stop_token_ids
        if self.text is not None:
            may_stop = len(self.tokens) - len(self.request.prompt_ids) > self.request.min_new_tokens
            text = "" if is_stop_token else self.text.push([token], may_stop=may_stop)
            if self.text.stopped:
                reason = "stop"
            elif is_stop_token or reason:
                text += self.text.finish()  # text held back cannot become a stop string any more
            texts.append(text)
        return "stop" if is_stop_token else reason

    def _logprobs(self, tokens: list[int], logits: Tensor, path: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of tokens [n], if requested: tokens[i] was chosen from logits[path[i]]."""
        num = self.request.num_logprobs
        return () if num is None else logprobs_of(tokens, logits[list(path[: len(tokens)])], num)

    def note_prompt(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        """Store the log probabilities of prompt tokens, if requested.

        hidden [n, hidden]: the target's states, before its LM head, of the n prompt tokens of this step.
        """
        num, first = self.request.num_prompt_logprobs, self.num_cached + 1
        if num is None:
            return
        self.prompt_logprobs = self.prompt_logprobs or [None]
        next_tokens = self.tokens[first : first + len(hidden)]
        for start in range(0, len(next_tokens), HEAD_ROWS):  # logits of a whole prompt would not fit
            chunk = next_tokens[start : start + HEAD_ROWS]
            self.prompt_logprobs += logprobs_of(chunk, head(hidden[start : start + len(chunk)]), num)

    def restart(self) -> None:
        """Forget a prefill that is not complete."""
        self.num_cached = self.num_reused = self.num_draft_cached = 0
        self.features, self.next_tokens, self.prompt_logprobs = [], [], []


def num_fixed(rows: Sequence[Row]) -> int:
    """Tokens that rows of fixed block sizes verify, without their anchors."""
    return sum(row.next_block_size - 1 for row in rows if not row.adapts)


def logprobs_of(tokens: Sequence[int], logits: Tensor, num: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities of tokens [n] and of the `num` most probable ones, by logits [n, vocab]."""
    scores = logits.float().log_softmax(dim=-1)
    token_scores = scores.gather(1, tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
    top = scores.topk(num, dim=-1)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    most_probable = (tuple(zip(ids, values, strict=True)) for ids, values in pairs)
    return tuple(map(TokenLogprobs, token_scores, most_probable))
