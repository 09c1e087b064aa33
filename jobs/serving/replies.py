"""OpenAI's response objects: the chunks of a stream, or one complete object, from the pieces of all choices.

Log probabilities are the target's, before temperature and truncation, and include tokens whose text a stop string cut
off. In addition to OpenAI's fields, every response has the `seed`, and its usage has `block_size`, `layout`,
`num_steps`, `acceptance_length`, and the accepted tokens by source.
"""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from blockpilot.constraints.schemas import JsonObject
from blockpilot.engine.detokenize import TextStream
from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LOOKED_UP, SOURCE_NAMES, Request, Step, TokenLogprobs
from jobs.serving.answer import ChoiceText, Piece, ScoredToken, Shown, TokenText, unique_names
from jobs.serving.constraints.tools import CallReader, whole_calls
from jobs.serving.schema import Body, ChatRequest


class Answered(NamedTuple):
    """Record of a finished request, for log and metrics."""

    response_id: str
    endpoint: str
    outcome: str
    """finished, cancelled (by the client or by its deadline) or failed."""
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    num_tokens: int
    block_size: int | None
    """Largest block size; None if no block was verified."""
    acceptance_length: float | None
    first_token_s: float | None
    seconds: float


class ChatFormat:
    """Format of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, calls: Sequence[JsonObject]) -> JsonObject:
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        return {"message": message | ({"tool_calls": list(calls)} if calls else {})}

    def delta(self, text: str | None, first: bool, calls: Sequence[JsonObject] = ()) -> JsonObject:
        """Fields of one chunk; `text` is None in the last one."""
        role = {"role": "assistant"} if first else {}
        called = {"tool_calls": list(calls)} if calls else {}
        return {"delta": role | ({} if text is None or (calls and not text) else {"content": text}) | called}

    def logprobs(self, tokens: Sequence[TokenText]) -> JsonObject:
        content = [
            _chat_token(token.scored) | {"top_logprobs": list(map(_chat_token, token.likeliest))} for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chat_token(token: ScoredToken) -> JsonObject:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


class CompletionFormat:
    """Format of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str, calls: Sequence[JsonObject]) -> JsonObject:
        return {"text": text}

    def delta(self, text: str | None, first: bool, calls: Sequence[JsonObject] = ()) -> JsonObject:
        return {"text": text or ""}

    def logprobs(self, tokens: Sequence[TokenText]) -> JsonObject:
        """Log probabilities of tokens; null for a prompt's first token, which has none."""
        return {
            "tokens": [token.scored.text for token in tokens],
            "token_logprobs": [token.scored.logprob for token in tokens],
            "top_logprobs": [None if t.scored.logprob is None else unique_names(t.likeliest) for t in tokens],
            "text_offset": [token.offset for token in tokens],
        }


class Reply:
    """Response to one body: takes the steps of its requests, and yields the objects to send, without waiting.

    name: of the model. interval: returns the minimum seconds between two chunks of a choice. readers: parser of the
    tool calls of each choice, None without tools.
    """

    def __init__(
        self,
        body: Body,
        requests: Sequence[Request],
        name: str,
        pair: Pair,
        interval: Callable[[], float],
        readers: Sequence[CallReader | None],
    ) -> None:
        self.body, self.request = body, requests[0]
        self._tokenizer = pair.tokenizer
        self.choices = [ChoiceText(r, pair, i, interval, self._shown(i)) for i, r in enumerate(requests)]
        self._prompts = [request.prompt_ids for request in requests[:: body.n]]
        self._prompt_entries: dict[int, list[JsonObject | None]] = {}  # by number of the prompt
        self._decoded = cache(lambda token: str(pair.tokenizer.decode([token])))
        self._readers = readers
        self._format = ChatFormat() if isinstance(body, ChatRequest) else CompletionFormat()
        self._head: JsonObject = {
            "id": self._format.id_prefix + uuid.uuid4().hex,
            "object": self._format.chunk_object if body.stream else self._format.whole_object,
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": f"fp_{pair.id.target_revision[:8]}_{pair.id.draft_revision[:8]}",
            "seed": self.request.sampling.seed,
        }

    def _shown(self, index: int) -> Shown:
        """Contents of a choice; the choices of a prompt are consecutive."""
        steps = self.body.stream_options.include_steps
        if isinstance(self.body, ChatRequest):
            return Shown(steps=steps)
        prompt = self.body.prompt[index // self.body.n]
        echo = (prompt if isinstance(prompt, str) else self._text(prompt)) if self.body.echo else None
        return Shown(echo, answer=self.body.num_tokens_asked != 0, stop_token=True, steps=steps)

    def _text(self, tokens: Sequence[int]) -> str:
        text = TextStream(self._tokenizer)
        return text.push(tokens) + text.finish()

    def take(self, number: int, step: Step) -> Iterator[JsonObject]:
        """Add a step of the request with this number; yields its chunks if the body asks for a stream."""
        choice = self.choices[number]
        for piece in choice.take(step):
            yield from self._chunks(choice, piece)
            choice.keep(piece)
        if choice.finish_reason is not None:
            yield from self._chunks(choice, None)

    def _chunks(self, choice: ChoiceText, piece: Piece | None) -> Iterator[JsonObject]:
        """The chunk of a piece or of the end of a choice (None), if there is anything to send."""
        options = self.body.stream_options
        if self.body.stream and (choice_chunk := self._chunk(choice, piece)):
            so_far = self.usage() if options.continuous_usage_stats else None
            usage = {"usage": so_far} if so_far or options.include_usage else {}
            yield self._head | usage | {"choices": [choice_chunk]}

    def last(self) -> JsonObject | None:
        """The last object: the complete response, or the usage of a stream if requested."""
        if self.body.stream:
            wants_usage = self.body.stream_options.include_usage
            return self._head | {"choices": [], "usage": self.usage()} | self._metrics() if wants_usage else None
        choices = [self._whole(choice) for choice in self.choices]
        prompt = {}
        if self.body.prompt_logprobs is not None and isinstance(self.body, ChatRequest):
            prompt = {"prompt_logprobs": self._prompt_logprobs(self.choices[0], self.body.prompt_logprobs)}
        return self._head | {"choices": choices, "usage": self.usage()} | prompt | self._metrics()

    def _whole(self, choice: ChoiceText) -> JsonObject:
        text, calls = "".join(choice.texts), list[JsonObject]()
        if (reader := self._readers[choice.index]) is not None:
            deltas = reader.push(text, is_last=True)
            content_text, calls = "".join(delta.content for delta in deltas), whole_calls(deltas)
            if choice.finish_reason == "stop" and calls and not reader.is_whole:
                # A stop string cut the last call: return it as text, so that no client runs it.
                content_text, calls = content_text + text[reader.last_begins :], calls[:-1]
            text = content_text
        content = self._format.whole(text, calls)
        if self.body.prompt_logprobs is not None and not isinstance(self.body, ChatRequest):
            content["prompt_logprobs"] = self._prompt_logprobs(choice, self.body.prompt_logprobs)
        return self._choice(choice, content, self._logprobs(choice.tokens), choice.finish_reason)

    def _prompt_logprobs(self, choice: ChoiceText, num_likeliest: int) -> list[JsonObject | None]:
        """Log probabilities of the prompt, which its choices share, as in vLLM: by token id, with ranks if known."""
        number = choice.index // self.body.n
        if number not in self._prompt_entries:
            scored = zip(self._prompts[number], choice.prompt_logprobs, strict=True)
            entries = [
                None if scores is None else self._entry(token, scores, num_likeliest) for token, scores in scored
            ]
            self._prompt_entries[number] = entries
        return self._prompt_entries[number]

    def _entry(self, token: int, scores: TokenLogprobs, num_likeliest: int) -> JsonObject:
        ranks = {likely: rank for rank, (likely, _) in enumerate(scores.likeliest, 1)}
        values = {token: scores.logprob} | dict(scores.likeliest[:num_likeliest])
        return {
            str(t): {"logprob": value, "rank": ranks.get(t), "decoded_token": self._decoded(t)}
            for t, value in values.items()
        }

    def _chunk(self, choice: ChoiceText, piece: Piece | None) -> JsonObject | None:
        """The choice of one chunk; None if there is nothing to send."""
        first, text, calls = not choice.texts, None if piece is None else piece.text, list[JsonObject]()
        if (reader := self._readers[choice.index]) is not None:
            deltas = reader.push(text or "", is_last=piece is None)
            text = "".join(delta.content for delta in deltas) or (None if piece is None else "")
            calls = [delta.as_json() for delta in deltas if delta.number >= 0]
        content = self._format.delta(text, first and piece is not None, calls)
        if piece is None:
            return self._choice(choice, content, None, choice.finish_reason)
        if not (first or text or calls or piece.tokens or piece.step):
            return None
        chunk = self._choice(choice, content, self._logprobs(piece.tokens), None)
        if (step := piece.step) is not None:  # block size 0 marks the first token, which the prefill emits
            texts = list(piece.step_texts)
            drafted = {"drafted": list(piece.drafted_texts), "parents": list(step.tree.parents), "path": step.path}
            drafted["sources"] = [SOURCE_NAMES[source] for source in step.tree.sources]
            counts = {"block_size": step.block_size, "num_accepted": step.num_accepted}
            chunk["step"] = counts | {"texts": texts} | drafted
        return chunk

    def _choice(
        self, choice: ChoiceText, content: JsonObject, logprobs: JsonObject | None, finish_reason: str | None
    ) -> JsonObject:
        reader = self._readers[choice.index]
        if finish_reason == "stop" and reader is not None and reader.is_whole:
            finish_reason = "tool_calls"
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[TokenText]) -> JsonObject | None:
        return None if self.body.num_logprobs is None else self._format.logprobs(tokens)

    def usage(self) -> JsonObject:
        """Counts over all choices; block size and acceptance are null if no block was verified."""
        num_prompt_tokens = sum(map(len, self._prompts))
        choices_by_prompt = [self.choices[i : i + self.body.n] for i in range(0, len(self.choices), self.body.n)]
        num_cached = sum(min(choice.num_reused for choice in choices) for choices in choices_by_prompt)
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        num_steps = sum(choice.num_steps for choice in self.choices)
        num_emitted = sum(choice.num_emitted for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "block_size": self.request.block_size or max(choice.block_size for choice in self.choices) or None,
            "layout": next((choice.layout for choice in self.choices if choice.layout), None),
            "num_steps": num_steps,
            "acceptance_length": num_emitted / num_steps if num_steps else None,
            "num_accepted_drafted": self._num_accepted(DRAFTED),
            "num_accepted_looked_up": self._num_accepted(LOOKED_UP),
        }

    def _num_accepted(self, source: int) -> int:
        """Accepted tokens that this source proposed, alone or together with another."""
        return sum(num for choice in self.choices for sources, num in choice.sources.items() if sources & source)

    def _metrics(self) -> JsonObject:
        """Acceptance metrics under vLLM's names, for a response with one choice that has drafted."""
        choice = self.choices[0]
        if len(self.choices) > 1 or not choice.num_drafted:
            return {}
        num_accepted = sum(length * num for length, num in choice.accepted.items())
        metrics = {
            "mean_acceptance_length": 1 + num_accepted / choice.num_steps,
            "draft_acceptance_rate": num_accepted / choice.num_drafted,
            "acceptance_histogram": [choice.accepted[i] for i in range(max(choice.accepted) + 1)],
            "num_draft_tokens": choice.num_drafted,
        }
        return {"metrics": {"speculative_decoding": metrics}}

    def answered(self, outcome: str, started: float) -> Answered:
        """Record of this request; `started` is its arrival (time.monotonic)."""
        usage, now = self.usage(), time.monotonic()
        first = min((choice.first_token_at for choice in self.choices if choice.first_token_at), default=None)
        return Answered(
            response_id=self._head["id"],
            endpoint=self.body.path,
            outcome=outcome,
            num_choices=len(self.choices),
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_tokens=usage["completion_tokens"],
            block_size=usage["block_size"],
            acceptance_length=usage["acceptance_length"],
            first_token_s=None if first is None else first - started,
            seconds=now - started,
        )
