"""From requests of the OpenAI API to an engine loop and back: one model as the API serves it.

Of `n` choices, number i has the seed plus i. Log probabilities are the target's own, before temperature and
truncation. In every response there is the seed that was used, and in its usage `block_size`, `num_steps` and
`acceptance_length`.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import TemplateError

from blockpilot.control.price import StepCosts
from blockpilot.engine.detokenize import TextStream
from blockpilot.models.device import device_name, dtype_name
from blockpilot.pairs.loading import Pair
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Policy, Request, Sampling, Step
from jobs.serving.engine_loop import ClosedError, EngineError, EngineLoop, QueueFullError, Stream
from jobs.serving.schema import ApiError, Body, ChatRequest, CompletionRequest

log = logging.getLogger("ray.serve.blockpilot")  # Serve adds the id of the request


class Answered(NamedTuple):
    """A request that has left the engine, as it is logged and counted."""

    response_id: str
    endpoint: str
    outcome: str
    """finished, cancelled (the client has gone, or its time was over) or failed."""
    num_choices: int
    num_prompt_tokens: int
    num_tokens: int
    block_size: int | None
    """The largest one used; None if no block was verified."""
    acceptance_length: float | None
    first_token_s: float | None
    seconds: float


@dataclass
class Backend:
    """A model as the API serves it: an engine loop, and the policy that chooses its block sizes, in words."""

    loop: EngineLoop
    policy: Mapping[str, object] = field(default_factory=lambda: {"name": "none"})
    max_new_tokens: int | None = None
    """Of an answer, where the context leaves room for more."""
    on_answer: Callable[[Answered], None] = lambda answered: None
    logs_prompts: bool = False
    stream_interval_s: float = 0.0
    """Between two chunks of a stream: what comes sooner goes with the next step."""

    def set_policy(self, policy: Policy, described: Mapping[str, object], costs: StepCosts | None = None) -> None:
        """Choose block sizes by `policy` from the next prefill on; `costs` are what it weighs its forecasts with."""
        self.loop.set_policy(policy, costs)
        self.policy = described

    @property
    def pair(self) -> Pair:
        return self.loop.engine.pair

    @property
    def model(self) -> str:
        return self.pair.id.target

    @property
    def fingerprint(self) -> str:
        """Target and draft revision, short."""
        return f"fp_{self.pair.id.target_revision[:8]}_{self.pair.id.draft_revision[:8]}"

    async def status(self) -> dict[str, Any]:
        """What /health tells of the model."""
        loop, engine, policy = self.loop, self.loop.engine, self.loop.engine.policy
        return {
            "status": "ok" if loop.healthy else "failed",
            "draft": self.pair.id.draft,
            "device": device_name(self.pair.target.device),
            "dtype": dtype_name(self.pair.target.dtype),
            "policy": dict(self.policy),
            "step_costs": loop.live_costs.factors,
            "resting": engine.resting,
            "accepted_over_expected": policy.record.ratio if isinstance(policy, LearnedPolicy) else None,
            "num_in_flight": loop.num_in_flight,
            "num_active": engine.num_active,
            "capacity": loop.capacity,
            "num_slots": engine.num_slots,
            "max_model_len": engine.max_length,
            "cache_bytes": engine.cache_bytes,
        }

    async def whole(self, body: Body) -> dict[str, Any]:
        """The response in one piece. Raises ApiError; leaving early frees its rows."""
        reply = await self._reply(body)
        with reply.kept_track_of():
            return await reply.whole()

    async def chunks(self, body: Body) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a streamed response. Raises ApiError; leaving early frees its rows."""
        reply = await self._reply(body)
        with reply.kept_track_of():
            async with aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _reply(self, body: Body) -> "Reply":
        """Start decoding all choices; raises ApiError for what the engine cannot take, or not now."""
        try:
            request = await asyncio.to_thread(self._request, body)  # a long prompt is not tokenized at once
            streams = self.loop.submit_all([_choice_request(request, number) for number in range(body.n)])
        except QueueFullError as error:
            raise ApiError(429, f"{error}; try again", code="queue_full") from None
        except ClosedError as error:
            raise _failure(error) from None
        except ValueError as error:
            param = "block_size" if str(error).startswith("block_size") else body.prompt_field
            raise ApiError(400, str(error), param) from None
        return Reply(self, body, streams)

    def _request(self, body: Body) -> Request:
        prompt_ids = self._encode(body)
        seed = body.seed if body.seed is not None else secrets.randbits(53)  # exact in every JSON reader
        return Request(
            prompt_ids,
            self._num_tokens(body, len(prompt_ids)),
            Sampling(body.temperature, body.top_p, body.top_k, seed),
            body.block_size,
            self.pair.stop_token_ids,
            tuple(body.stop),
            body.num_logprobs,
        )

    def _num_tokens(self, body: Body, num_prompt_tokens: int) -> int:
        """Tokens of the answer at most; raises ApiError where there is no room for as many as are asked for."""
        context, asked, most = self.loop.engine.max_length, body.num_tokens_asked, self.max_new_tokens
        room = context - num_prompt_tokens
        if (asked or 1) > room:
            message = f"the context is {context} tokens; the prompt has {num_prompt_tokens}"
            message += f" and the answer needs {asked or 'at least 1'}"
            field = body.prompt_field if room < 1 else "max_tokens"
            raise ApiError(400, message, field, "context_length_exceeded")
        if most is not None and (asked or 1) > most:
            message = f"max_tokens: {asked} are asked for; this server gives at most {most}"
            raise ApiError(400, message, "max_tokens", "max_tokens_exceeded")
        return asked or (room if most is None else min(room, most))

    def _encode(self, body: Body) -> tuple[int, ...]:
        tokenizer = self.pair.tokenizer
        if isinstance(body, ChatRequest):
            turns = [("system" if m.role == "developer" else m.role, m.content) for m in body.messages]
            try:
                return Prompt("request", tuple(Message(*turn) for turn in turns)).encode(tokenizer)
            except TemplateError as error:
                raise ApiError(400, f"messages: the model's chat template says: {error}", "messages") from None
        if isinstance(body.prompt, str):
            return tuple(tokenizer(body.prompt)["input_ids"])
        return tuple(body.prompt)


def _choice_request(request: Request, number: int) -> Request:
    """The request of choice `number`: the same with its own seed, an int64 that wraps around."""
    seed = (request.sampling.seed + number + 2**63) % 2**64 - 2**63
    return replace(request, sampling=replace(request.sampling, seed=seed))


class Token(NamedTuple):
    """An emitted token with log probabilities, as text."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]


class Piece(NamedTuple):
    """What a step, or several at once, add to an answer; the text may lag behind the tokens."""

    text: str
    tokens: tuple[Token, ...] = ()
    step: "ShownStep | None" = None


class ShownStep(NamedTuple):
    """A step and the text that each of its tokens made final."""

    step: Step
    texts: list[str]

    def fields(self) -> dict[str, Any]:
        """For a chunk's choice; block size 0 marks the first token, which the prefill emits."""
        step = self.step
        shown = {"block_size": step.block_size, "num_accepted": step.num_accepted, "texts": self.texts}
        return {"step": shown}


class Answer:
    """The text of one choice as its steps come, and what they add up to."""

    def __init__(
        self, stream: Stream, pair: Pair, index: int, *, interval_s: float = 0.0, include_steps: bool = False
    ) -> None:
        self.index = index
        self.first_token: float | None = None  # when it came
        self._stream, self._tokenizer = stream, pair.tokenizer
        self._interval_s, self._include_steps = interval_s, include_steps
        self._stop_token_ids = stream.request.stop_token_ids
        self._text = TextStream(pair.tokenizer, stream.request.stop_strings)
        self.finish_reason: str | None = None
        self.num_tokens = self.num_steps = self.num_emitted = self.block_size = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """One for each step or interval, and one at the end, possibly empty; cancels when left early."""
        with self._stream:
            if self._include_steps:
                async for step in self._stream:
                    self._count(step)
                    texts = [self._text.push([token]) for token in self._shown(step)]
                    yield Piece("".join(texts), tuple(self._tokens(step)), ShownStep(step, texts))
            else:
                async with aclosing(self._gathered()) as gathered:
                    async for steps in gathered:
                        shown = [token for step in steps for token in self._shown(step)]
                        tokens = tuple(token for step in steps for token in self._tokens(step))
                        yield Piece(self._text.push(shown), tokens)
        yield Piece(self._text.finish())

    async def _gathered(self) -> AsyncGenerator[list[Step], None]:
        """The steps, those that come within an interval with the next one. The first one comes alone."""
        steps, due = list[Step](), 0.0
        async for step in self._stream:
            self._count(step)
            steps.append(step)
            now = time.monotonic()
            if now >= due or step.finish_reason is not None:
                yield steps
                steps, due = [], now + self._interval_s

    def _shown(self, step: Step) -> list[int]:
        return [token for token in step.tokens if token not in self._stop_token_ids]

    def _tokens(self, step: Step) -> Iterator[Token]:
        for token, found in zip(step.tokens, step.logprobs, strict=bool(step.logprobs)):
            if token not in self._stop_token_ids:
                likeliest = tuple((self._decode(each), logprob) for each, logprob in found.likeliest)
                yield Token(self._decode(token), found.logprob, likeliest)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _count(self, step: Step) -> None:
        self.first_token = self.first_token or time.monotonic()
        self.finish_reason = step.finish_reason
        self.num_tokens += len(step.tokens)
        if step.block_size:  # not the prefill
            self.num_steps += 1
            self.num_emitted += len(step.tokens)
            self.block_size = max(self.block_size, step.block_size)  # a step near the limit has a smaller one


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, Piece | None], None]:
    """Pieces of all answers as they come, None at the end of each; cancels all when left early or when one fails."""
    events: asyncio.Queue[tuple[Answer, Piece | None] | Exception] = asyncio.Queue()

    async def follow(answer: Answer) -> None:
        try:
            async with aclosing(answer.pieces()) as pieces:
                async for piece in pieces:
                    events.put_nowait((answer, piece))
            events.put_nowait((answer, None))
        except Exception as error:
            events.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(answer)) for answer in answers]
    try:
        num_left = len(answers)
        while num_left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            num_left -= event[1] is None
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- responses ---


class ChatShape:
    """Objects of /v1/chat/completions."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str | None, first: bool) -> dict[str, Any]:
        """A delta; text None is the last one."""
        role = {"role": "assistant"} if first else {}
        return {"delta": role | ({} if text is None else {"content": text})}

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        content = [
            _chat_token(token.text, token.logprob)
            | {"top_logprobs": [_chat_token(*each) for each in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, Any]:
    """Bytes are null for a token that is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class CompletionShape:
    """Objects of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str | None, first: bool) -> dict[str, Any]:
        return {"text": text or ""}

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        """text_offset counts the characters of the tokens before, from `offset` on."""
        offsets = accumulate((len(token.text) for token in tokens[:-1]), initial=offset)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.likeliest) for token in tokens],
            "text_offset": list(offsets) if tokens else [],
        }


Shape = ChatShape | CompletionShape


class Reply:
    """One request on its way back: its choices, and the fields that all its objects share."""

    def __init__(self, backend: Backend, body: Body, streams: list[Stream]) -> None:
        self.backend, self.body, self.streams = backend, body, streams
        self.shape: Shape = ChatShape() if isinstance(body, ChatRequest) else CompletionShape()
        self.answers = [
            Answer(stream, backend.pair, i, interval_s=backend.stream_interval_s, include_steps=body.include_steps)
            for i, stream in enumerate(streams)
        ]
        self.head: dict[str, Any] = {
            "id": self.shape.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": backend.model,
            "system_fingerprint": backend.fingerprint,
            "seed": streams[0].request.sampling.seed,
        }

    @contextmanager
    def kept_track_of(self) -> Iterator[None]:
        """Free its rows, log it and count it when it is over, however it ends."""
        started, outcome = time.monotonic(), "cancelled"
        try:
            yield
            outcome = "finished"
        except (EngineError, ClosedError) as error:
            outcome = "failed"
            raise _failure(error) from None
        finally:
            for stream in self.streams:
                stream.close()
            self._tell(outcome, started)

    def _tell(self, outcome: str, started: float) -> None:
        usage = self.usage()
        first = min((answer.first_token for answer in self.answers if answer.first_token), default=None)
        answered = Answered(
            response_id=self.head["id"],
            endpoint=self.body.path,
            outcome=outcome,
            num_choices=len(self.answers),
            num_prompt_tokens=usage["prompt_tokens"],
            num_tokens=usage["completion_tokens"],
            block_size=usage["block_size"],
            acceptance_length=usage["acceptance_length"],
            first_token_s=None if first is None else first - started,
            seconds=time.monotonic() - started,
        )
        prompt = {"prompt": self.body.prompt_text} if self.backend.logs_prompts else {}
        log.info("answered", extra={"log_to_stderr": False, **answered._asdict(), **prompt})
        self.backend.on_answer(answered)

    @property
    def prefix(self) -> str:
        """The prompt, where it is to be repeated."""
        if not (isinstance(self.body, CompletionRequest) and self.body.echo):
            return ""
        prompt = self.body.prompt
        return prompt if isinstance(prompt, str) else str(self.backend.pair.tokenizer.decode(prompt))

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts and ours over all choices; what is not known is null: no block chosen, or none verified."""
        request = self.streams[0].request
        num_prompt_tokens, num_tokens = len(request.prompt_ids), sum(answer.num_tokens for answer in self.answers)
        num_steps = sum(answer.num_steps for answer in self.answers)
        num_emitted = sum(answer.num_emitted for answer in self.answers)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "block_size": request.block_size or max(answer.block_size for answer in self.answers) or None,
            "num_steps": num_steps,
            "acceptance_length": num_emitted / num_steps if num_steps else None,
        }

    async def whole(self) -> dict[str, Any]:
        """The response without a stream."""
        texts, tokens = [[self.prefix] for _ in self.answers], [list[Token]() for _ in self.answers]
        async with aclosing(merged(self.answers)) as pieces:
            async for answer, piece in pieces:
                if piece is not None:
                    texts[answer.index].append(piece.text)
                    tokens[answer.index] += piece.tokens
        choices = [
            self._choice(answer, self.shape.whole("".join(texts[i])), tokens[i], 0, answer.finish_reason)
            for i, answer in enumerate(self.answers)
        ]
        return self.head | {"object": self.shape.whole_object, "choices": choices, "usage": self.usage()}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a stream."""
        head = self.head | {"object": self.shape.chunk_object}
        if self.body.include_usage:
            head["usage"] = None
        begun, offsets = set[int](), [0] * len(self.answers)
        async with aclosing(merged(self.answers)) as pieces:
            async for answer, piece in pieces:
                i, first = answer.index, answer.index not in begun
                if piece is None:
                    content = self.shape.piece(None, first=False)
                    yield head | {"choices": [self._choice(answer, content, None, 0, answer.finish_reason)]}
                elif first or piece.text or piece.tokens or piece.step:
                    begun.add(i)
                    content = self.shape.piece(self.prefix * first + piece.text, first)
                    choice = self._choice(answer, content, piece.tokens, offsets[i], None)
                    yield head | {"choices": [choice | (piece.step.fields() if piece.step else {})]}
                    offsets[i] += sum(len(token.text) for token in piece.tokens)
        if self.body.include_usage:
            yield head | {"choices": [], "usage": self.usage()}

    def _choice(
        self,
        answer: Answer,
        content: dict[str, Any],
        tokens: Sequence[Token] | None,
        offset: int,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        """A choice of a response; tokens None for the end of a stream, which has none."""
        logprobs = None
        if self.body.num_logprobs is not None and tokens is not None:
            logprobs = self.shape.logprobs(tokens, offset)
        return {"index": answer.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _failure(error: EngineError | ClosedError) -> ApiError:
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="shutting_down")
    return ApiError(500, f"{error}; the request is lost, others can be sent", code="engine_error")
