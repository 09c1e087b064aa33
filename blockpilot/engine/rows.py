"""A request while the engine holds it: its tokens, where it ends, and the step that it reports."""

from dataclasses import dataclass

from torch import Tensor, tensor

from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.sampling import count_accepted
from blockpilot.types import FinishReason, Forecast, Request, Step, TokenLogprobs


@dataclass(eq=False)
class Row:
    """One sequence. `tokens` are final; the target's cache holds all but the last one, the anchor."""

    request_id: int
    request: Request
    limit: int
    """Tokens of prompt and answer together at most."""
    tokens: list[int]
    text: TextStream | None
    """Finds stop strings; None where the request has none."""
    num_cached: int = 0
    """Prompt tokens that went through the target, until all have."""
    block_size: int = 0
    """0 until it is decided."""
    forecast: Forecast | None = None
    """What every step's block size is chosen from; None where one size is fixed."""
    can_draft: bool = True
    """The draft's cache is kept up with the row's context."""
    finished: bool = False

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that have not gone through the target."""
        return len(self.tokens) - self.num_cached

    @property
    def next_block_size(self) -> int:
        """The block size of the next step: no token beyond the limit is verified."""
        return min(self.block_size, self.limit - len(self.tokens))

    def stop_drafting(self) -> None:
        """Decode plainly to the end, unless the request fixed a larger block size."""
        if self.forecast is not None or not self.block_size:
            self.can_draft, self.forecast, self.block_size = False, None, 1

    def verify(self, drafted: list[int], chosen: list[int], logits: Tensor) -> Step:
        """Emit the accepted prefix of `drafted` (B-1) and the bonus token: both are the target's `chosen` (B).

        logits [B, vocab] are those that the target's tokens were drawn from.
        """
        num_accepted = count_accepted(drafted, chosen)
        if self.forecast is not None:
            self.forecast.observe(len(chosen), num_accepted)
        return self.commit(chosen[: num_accepted + 1], logits, len(chosen), num_accepted)

    def commit(self, tokens: list[int], logits: Tensor, block_size: int = 0, num_accepted: int = 0) -> Step:
        """Append tokens up to the first that ends the request; logits [n, vocab] begin with the first token's."""
        emitted, texts = list[int](), list[str]()
        reason: FinishReason | None = None
        while reason is None and len(emitted) < len(tokens):
            emitted.append(tokens[len(emitted)])
            self.tokens.append(emitted[-1])
            reason = self._end(emitted[-1], texts)
        self.finished = reason is not None
        accepted, logprobs = min(num_accepted, len(emitted)), self._logprobs(emitted, logits)
        return Step(self.request_id, tuple(emitted), block_size, accepted, reason, None, logprobs, tuple(texts))

    def _end(self, token: int, texts: list[str]) -> FinishReason | None:
        """Why the request ends with the token just appended, if it does; adds the token's text to `texts`."""
        reason: FinishReason | None = "length" if len(self.tokens) >= self.limit else None
        is_stop_token = token in self.request.stop_token_ids
        if self.text is not None:
            text = "" if is_stop_token else self.text.push([token])
            if self.text.stopped:
                reason = "stop"
            elif is_stop_token or reason:
                text += self.text.finish()  # what was held back cannot become a stop string any more
            texts.append(text)
        return "stop" if is_stop_token else reason

    def _logprobs(self, tokens: list[int], logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of tokens, where the request asks for them; logits [n, vocab] begin with the first's."""
        num = self.request.num_logprobs
        if num is None:
            return ()
        scores = logits[: len(tokens)].float().log_softmax(dim=-1)
        of_tokens = scores.gather(1, tensor(tokens, device=scores.device)[:, None])[:, 0].tolist()
        top = scores.topk(num, dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        likeliest = (tuple(zip(ids, values, strict=True)) for ids, values in pairs)
        return tuple(map(TokenLogprobs, of_tokens, likeliest))
