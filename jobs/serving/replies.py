"""OpenAI's response objects: the chunks of a stream, or one whole object, from the pieces of all choices.

Log probabilities are the target's own, before temperature and truncation. Beyond OpenAI's fields, every response has
the seed that was used, and its usage has `block_size`, `layout`, `num_steps` and `acceptance_length`.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import NamedTuple

from blockpilot.constraints.schemas import JsonObject
from jobs.serving.answer import ChoiceText, Piece, TokenText, merged
from jobs.serving.backends import PairFacts
from jobs.serving.engine_loop import Stream
from jobs.serving.schema import Body, ChatRequest
from jobs.serving.tool_calls import CallReader, whole_calls


class Answered(NamedTuple):
    """A request that has left the engine, as it is logged and counted."""

    response_id: str
    endpoint: str
    outcome: str
    """finished, cancelled (by the client or by its deadline) or failed."""
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Those of them that were kept of other requests."""
    num_tokens: int
    block_size: int | None
    """The largest one used; None if no block was verified."""
    acceptance_length: float | None
    first_token_s: float | None
    seconds: float


class ChatFormat:
    """Fields of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, calls: Sequence[JsonObject]) -> JsonObject:
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        return {"message": message | ({"tool_calls": list(calls)} if calls else {})}

    def delta(self, text: str | None, first: bool, calls: Sequence[JsonObject] = ()) -> JsonObject:
        """Of one chunk; text None is the last one."""
        role = {"role": "assistant"} if first else {}
        called = {"tool_calls": list(calls)} if calls else {}
        return {"delta": role | ({} if text is None or (calls and not text) else {"content": text}) | called}

    def logprobs(self, tokens: Sequence[TokenText], offset: int) -> JsonObject:
        content = [
            _chat_token(token.text, token.logprob)
            | {"top_logprobs": [_chat_token(*each) for each in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> JsonObject:
    """Bytes are null for a token that is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class CompletionFormat:
    """Fields of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str, calls: Sequence[JsonObject]) -> JsonObject:
        return {"text": text}

    def delta(self, text: str | None, first: bool, calls: Sequence[JsonObject] = ()) -> JsonObject:
        return {"text": text or ""}

    def logprobs(self, tokens: Sequence[TokenText], offset: int) -> JsonObject:
        """text_offset counts the characters of all tokens before, the first `offset` of them in earlier chunks."""
        offsets = accumulate((len(token.text) for token in tokens[:-1]), initial=offset)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.likeliest) for token in tokens],
            "text_offset": list(offsets) if tokens else [],
        }


class Reply:
    """The response to one request: its choices, and the fields that all its objects share.

    `name` is the model's; `interval` gives the least seconds between two chunks of a choice; `readers` find the calls
    of each choice, where there may be some.
    """

    def __init__(
        self,
        body: Body,
        streams: Sequence[Stream],
        name: str,
        pair: PairFacts,
        interval: Callable[[], float],
        readers: Sequence[CallReader | None],
    ) -> None:
        self.body, self.request = body, streams[0].request
        include_steps = body.stream_options.include_steps
        self.choices = [ChoiceText(each, pair, i, interval, include_steps) for i, each in enumerate(streams)]
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

    async def chunks(self) -> AsyncGenerator[JsonObject, None]:
        """Take in all pieces; with `stream` in the body, yield their chunks. Leaving early cancels all choices."""
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        async with aclosing(merged(self.choices)) as pieces:
            async for choice, piece in pieces:
                if self.body.stream and (shown := self._chunk(choice, piece)):
                    yield self._head | usage | {"choices": [shown]}
                if piece is not None:
                    choice.take(piece)

    def last(self) -> JsonObject | None:
        """What follows the chunks: the whole object, or the usage of a stream that asks for it."""
        if self.body.stream:
            asked = self.body.stream_options.include_usage
            return self._head | {"choices": [], "usage": self.usage()} | self._metrics() if asked else None
        choices = [self._whole(choice) for choice in self.choices]
        return self._head | {"choices": choices, "usage": self.usage()} | self._metrics()

    def _whole(self, choice: ChoiceText) -> JsonObject:
        text, calls = "".join(choice.texts), list[JsonObject]()
        if (reader := self._readers[choice.index]) is not None:
            deltas = reader.push(text, is_last=True)
            text, calls = "".join(delta.content for delta in deltas), whole_calls(deltas)
        content = self._format.whole(text, calls)
        return self._choice(choice, content, self._logprobs(choice.tokens), choice.finish_reason)

    def _chunk(self, choice: ChoiceText, piece: Piece | None) -> JsonObject | None:
        """The choice of one chunk; None for a piece with nothing to send."""
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
        logprobs = self._logprobs(piece.tokens, choice.num_token_characters)
        shown = self._choice(choice, content, logprobs, None)
        if (step := piece.step) is not None:  # block size 0 marks the first token, which the prefill emits
            texts = list(piece.step_texts)
            drafted = {"drafted": list(piece.drafted_texts), "parents": list(step.tree.parents), "path": step.path}
            counts = {"block_size": step.block_size, "num_accepted": step.num_accepted}
            shown["step"] = counts | {"texts": texts} | drafted
        return shown

    def _choice(
        self, choice: ChoiceText, content: JsonObject, logprobs: JsonObject | None, finish_reason: str | None
    ) -> JsonObject:
        reader = self._readers[choice.index]
        if finish_reason == "stop" and reader is not None and reader.is_whole:
            finish_reason = "tool_calls"
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, tokens: Sequence[TokenText], offset: int = 0) -> JsonObject | None:
        return None if self.body.num_logprobs is None else self._format.logprobs(tokens, offset)

    def usage(self) -> JsonObject:
        """Counts over all choices. What tells of blocks is null where none was verified."""
        num_prompt_tokens = len(self.request.prompt_ids)
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        num_steps = sum(choice.num_steps for choice in self.choices)
        num_emitted = sum(choice.num_emitted for choice in self.choices)
        return {
            "prompt_tokens": num_prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": min(choice.num_reused for choice in self.choices)},
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "block_size": self.request.block_size or max(choice.block_size for choice in self.choices) or None,
            "layout": next((choice.layout for choice in self.choices if choice.layout), None),
            "num_steps": num_steps,
            "acceptance_length": num_emitted / num_steps if num_steps else None,
        }

    def _metrics(self) -> JsonObject:
        """Acceptance under vLLM's names, of the one choice of a response, if it has drafted."""
        choice = self.choices[0]
        if len(self.choices) > 1 or not choice.num_drafted:
            return {}
        num_accepted = sum(length * num for length, num in choice.accepted.items())
        found = {
            "mean_acceptance_length": 1 + num_accepted / choice.num_steps,
            "draft_acceptance_rate": num_accepted / choice.num_drafted,
            "acceptance_histogram": [choice.accepted[i] for i in range(max(choice.accepted) + 1)],
            "num_draft_tokens": choice.num_drafted,
        }
        return {"metrics": {"speculative_decoding": found}}

    def answered(self, outcome: str, started: float) -> Answered:
        """The record of this request; `started` is when it came (time.monotonic)."""
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
