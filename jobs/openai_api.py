"""The OpenAI chat and completions API over one engine loop.

What the API has and this server does not is refused by name, never ignored; null, and the value that changes
nothing (such as best_of=1), are accepted. Extensions: `block_size` and `top_k` in a request; `block_size`,
`num_steps` and `acceptance_length` in the usage; in every response the seed that was used. Of `n` choices, number i
has the seed plus i. Log probabilities are the target's own, before temperature and truncation.
"""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from blockpilot.costs import StepCosts
from blockpilot.engine import Policy, Request, Step
from blockpilot.pairs import Pair, target_slug
from blockpilot.prompts import Message, Prompt
from blockpilot.text import TextStream
from blockpilot.verify import Sampling
from jobs.engine_loop import ClosedError, EngineError, EngineLoop, QueueFullError, Stream

RETRY_AFTER_S = 1
MAX_STOPS = 4
MAX_CHOICES = 8
MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5  # of chat and of completions, as OpenAI documents them
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI documents it
T = TypeVar("T")

# Fields of the API that are not built, and the value with which each changes nothing.
NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logprobs": False,
    "store": False,
}


class ApiError(Exception):
    """An answer other than 200, in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else None

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


# --- requests ---


class _Body(BaseModel):
    """A JSON object; null means absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _stop_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _block_size(value: Any) -> Any:
    if value == "auto":
        return None
    if type(value) is not int or value < 1:
        raise ValueError('must be "auto" or an integer of at least 1')
    return value


def _content_text(value: Any) -> Any:
    """OpenAI's content is a string or a list of parts; text parts are joined by newlines."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must be a string or a list of {"type": "text", "text": ...} parts')
    return "\n".join(part["text"] for part in value)


def _prompt(value: Any) -> Any:
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not (isinstance(value, str) or is_ids):
        raise ValueError("must be one string or one list of token ids")
    return value


class ChatMessage(_Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content_text)]


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False


class GenerateRequest(_Body):
    """Fields that both endpoints share."""

    prompt_field: ClassVar[str]

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(_stop_list), Field(max_length=MAX_STOPS)
    ] = []
    block_size: Annotated[int | None, BeforeValidator(_block_size)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if not _neutral(k, v)} if isinstance(value, dict) else value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """The likeliest tokens to tell with every token; None for no log probabilities at all."""
        raise NotImplementedError


class ChatRequest(GenerateRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, found: ValidationInfo) -> int | None:
        if value is not None and not found.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return value

    @property
    def num_tokens_asked(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerateRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False

    @field_validator("echo")
    @classmethod
    def _check_echo(cls, value: bool, found: ValidationInfo) -> bool:
        if value and found.data.get("logprobs") is not None:
            raise ValueError("is not supported together with logprobs")
        return value

    @property
    def num_tokens_asked(self) -> int:
        return self.max_tokens if self.max_tokens is not None else DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def _neutral(name: str, value: object) -> bool:
    if name not in NEUTRAL:
        return False
    return value == NEUTRAL[name] and isinstance(value, bool) == isinstance(NEUTRAL[name], bool)


BodyT = TypeVar("BodyT", bound=GenerateRequest)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Read a request body; raises ApiError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"])) or None
        raise ApiError(400, _complaint(path, first), path, str(first["type"])) from None


def _complaint(path: str | None, error: Mapping[str, Any]) -> str:
    if path is None:
        return f"request body: {error['msg']}"
    if error["type"] == "missing":
        return f"{path}: this field is required"
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{path}: {message} (got {_short(error['input'])})"
    if path in NEUTRAL:
        return f"{path}: {_short(error['input'])} is not supported; allowed: {json.dumps(NEUTRAL[path])}"
    return f"{path}: this field is not supported"


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


# --- from requests to the engine and back ---


@dataclass
class Backend:
    """What the API serves: one engine loop, and its policy in words."""

    loop: EngineLoop
    policy_name: str = "none"

    def set_policy(self, policy: Policy, name: str, costs: StepCosts | None = None) -> None:
        """Choose block sizes by `policy` from the next prefill on; `costs` are what it weighs its forecasts with."""
        self.loop.set_policy(policy, costs)
        self.policy_name = name

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

    def check_model(self, name: str) -> None:
        known = (self.model, target_slug(self.model))
        if name not in known:
            message = f"model {_short(name)} does not exist; this server has {known[0]!r} (or {known[1]!r})"
            raise ApiError(404, message, "model", "model_not_found")

    def submit(self, body: ChatRequest | CompletionRequest) -> list[Stream]:
        """Start decoding all choices; raises ApiError for what the engine cannot take, or not now."""
        self.check_model(body.model)
        try:
            request = self._request(body)
            return self.loop.submit_all([_choice_request(request, number) for number in range(body.n)])
        except QueueFullError as error:
            raise ApiError(429, f"{error}; try again", code="queue_full", retry=True) from None
        except ClosedError as error:
            raise ApiError(503, str(error), code="shutting_down", retry=True) from None
        except ValueError as error:
            param = "block_size" if str(error).startswith("block_size") else body.prompt_field
            raise ApiError(400, str(error), param) from None

    def _request(self, body: ChatRequest | CompletionRequest) -> Request:
        prompt_ids = self._encode(body)
        context, asked = self.loop.engine.max_length, body.num_tokens_asked
        room = context - len(prompt_ids)
        if (asked or 1) > room:
            raise ApiError(
                400,
                f"the context is {context} tokens; the prompt has {len(prompt_ids)}"
                f" and the answer needs {asked or 'at least 1'}",
                body.prompt_field if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        seed = body.seed if body.seed is not None else secrets.randbits(53)  # exact in every JSON reader
        return Request(
            prompt_ids,
            asked or room,
            Sampling(body.temperature, body.top_p, body.top_k, seed),
            body.block_size,
            self.pair.stop_token_ids,
            tuple(body.stop),
            body.num_logprobs,
        )

    def _encode(self, body: ChatRequest | CompletionRequest) -> tuple[int, ...]:
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
    """What a step adds to an answer; the text may lag behind the tokens."""

    text: str
    tokens: tuple[Token, ...] = ()


class Answer:
    """The text of one choice as its steps come, and what they add up to."""

    def __init__(self, stream: Stream, pair: Pair, index: int) -> None:
        self.index = index
        self._stream, self._tokenizer = stream, pair.tokenizer
        self._stop_token_ids = stream.request.stop_token_ids
        self._text = TextStream(pair.tokenizer, stream.request.stop_strings)
        self.finish_reason: str | None = None
        self.num_tokens = self.num_steps = self.num_emitted = self.block_size = 0

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """One for each step and one at the end, possibly empty; cancels when left early."""
        with self._stream:
            async for step in self._stream:
                self._count(step)
                text = self._text.push(t for t in step.tokens if t not in self._stop_token_ids)
                yield Piece(text, tuple(self._tokens(step)))
        yield Piece(self._text.finish())

    def _tokens(self, step: Step) -> Iterator[Token]:
        for token, found in zip(step.tokens, step.logprobs, strict=bool(step.logprobs)):
            if token not in self._stop_token_ids:
                likeliest = tuple((self._decode(each), logprob) for each, logprob in found.likeliest)
                yield Token(self._decode(token), found.logprob, likeliest)

    def _decode(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _count(self, step: Step) -> None:
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

    def whole(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str | None, first: bool) -> dict[str, object]:
        """A delta; text None is the last one."""
        role = {"role": "assistant"} if first else {}
        return {"delta": role | ({} if text is None else {"content": text})}

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, object]:
        content = [
            _chat_token(token.text, token.logprob)
            | {"top_logprobs": [_chat_token(*each) for each in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _chat_token(text: str, logprob: float) -> dict[str, object]:
    """Bytes are null for a token that is a part of a character."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


class CompletionShape:
    """Objects of /v1/completions."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def whole(self, text: str) -> dict[str, object]:
        return {"text": text}

    def piece(self, text: str | None, first: bool) -> dict[str, object]:
        return {"text": text or ""}

    def logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, object]:
        """text_offset counts the characters of the tokens before, from `offset` on."""
        offsets = accumulate((len(token.text) for token in tokens[:-1]), initial=offset)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.likeliest) for token in tokens],
            "text_offset": list(offsets) if tokens else [],
        }


Shape = ChatShape | CompletionShape


@dataclass(frozen=True)
class Reply:
    """One request on its way back: its choices, and the fields that all its objects share."""

    backend: Backend
    shape: Shape
    body: ChatRequest | CompletionRequest
    streams: list[Stream]
    answers: list[Answer]
    head: dict[str, object]

    @classmethod
    def to(cls, backend: Backend, shape: Shape, body: ChatRequest | CompletionRequest) -> "Reply":
        """Start decoding; raises ApiError for what cannot be."""
        streams = backend.submit(body)
        answers = [Answer(stream, backend.pair, index) for index, stream in enumerate(streams)]
        head: dict[str, object] = {
            "id": shape.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": backend.model,
            "system_fingerprint": backend.fingerprint,
            "seed": streams[0].request.sampling.seed,
        }
        return cls(backend, shape, body, streams, answers, head)

    @property
    def prefix(self) -> str:
        """The prompt, where it is to be repeated."""
        if not (isinstance(self.body, CompletionRequest) and self.body.echo):
            return ""
        prompt = self.body.prompt
        return prompt if isinstance(prompt, str) else str(self.backend.pair.tokenizer.decode(prompt))

    def usage(self) -> dict[str, object]:
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

    async def whole(self) -> dict[str, object]:
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

    async def chunks(self) -> AsyncGenerator[dict[str, object], None]:
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
                    yield head | {"choices": [self._choice(answer, content, (), offsets[i], answer.finish_reason)]}
                elif first or piece.text or piece.tokens:
                    begun.add(i)
                    content = self.shape.piece(self.prefix * first + piece.text, first)
                    yield head | {"choices": [self._choice(answer, content, piece.tokens, offsets[i], None)]}
                    offsets[i] += sum(len(token.text) for token in piece.tokens)
        if self.body.include_usage:
            yield head | {"choices": [], "usage": self.usage()}

    def _choice(
        self,
        answer: Answer,
        content: dict[str, object],
        tokens: Sequence[Token],
        offset: int,
        finish_reason: str | None,
    ) -> dict[str, object]:
        wanted = self.body.num_logprobs is not None and (tokens or finish_reason is None or "delta" not in content)
        logprobs = self.shape.logprobs(tokens, offset) if wanted else None
        return {"index": answer.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


async def _respond(
    http: HttpRequest, backend: Backend, shape: Shape, body: ChatRequest | CompletionRequest
) -> Response:
    reply = Reply.to(backend, shape, body)
    try:
        if not body.stream:
            return JSONResponse(await _unless_gone(http, reply.whole()))
        chunks = reply.chunks()
        first = await _unless_gone(http, anext(chunks))  # fails with a status of its own, not in the stream
        return StreamingResponse(_events(first, chunks), media_type="text/event-stream")
    except BaseException:
        for stream in reply.streams:
            stream.close()
        raise


async def _events(first: dict[str, object], chunks: AsyncGenerator[dict[str, object], None]) -> AsyncIterator[str]:
    """Server-sent events: the chunks and [DONE]; or an error event."""
    yield _event(first)
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield _event(chunk)
    except (EngineError, ClosedError) as error:
        yield _event(_failure(error).body())
        return
    yield "data: [DONE]\n\n"


def _event(data: Mapping[str, object]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_client_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _failure(error: EngineError | ClosedError) -> ApiError:
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="shutting_down", retry=True)
    return ApiError(500, f"{error}; the request is lost, others can be sent", code="engine_error")


# --- the app ---


def make_app(backend: Backend) -> FastAPI:
    """The API as an ASGI application; it needs no Ray."""
    app = FastAPI(title="BlockPilot", openapi_url=None, redirect_slashes=False)

    @app.post("/v1/chat/completions")
    async def chat(http: HttpRequest) -> Response:
        return await _respond(http, backend, ChatShape(), parse(ChatRequest, await http.body()))

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await _respond(http, backend, CompletionShape(), parse(CompletionRequest, await http.body()))

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(backend)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        backend.check_model(name)
        return _model(backend)

    @app.get("/health")
    async def health() -> JSONResponse:
        loop = backend.loop
        report = {
            "status": "ok" if loop.healthy else "failed",
            "model": backend.model,
            "policy": backend.policy_name,
            "num_in_flight": loop.num_in_flight,
            "num_active": loop.engine.num_active,
            "capacity": loop.capacity,
        }
        return JSONResponse(report, 200 if loop.healthy else 503)

    _answer_errors(app)
    return app


def _model(backend: Backend) -> dict[str, object]:
    engine = backend.loop.engine
    return {"id": backend.model, "object": "model", "created": 0, "owned_by": "blockpilot"} | {
        "max_model_len": engine.max_length
    }


def _answer_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def refused(_: HttpRequest, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(EngineError)
    @app.exception_handler(ClosedError)
    async def failed(_: HttpRequest, error: EngineError | ClosedError) -> JSONResponse:
        return _failure(error).response()

    @app.exception_handler(HTTPException)
    async def no_route(http: HttpRequest, error: HTTPException) -> JSONResponse:
        answer = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unforeseen(_: HttpRequest, error: Exception) -> JSONResponse:
        return ApiError(500, f"internal error ({type(error).__name__})").response()
