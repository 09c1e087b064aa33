"""Replica of the server: one pair, one engine, and its policy (policies.py)."""

import asyncio
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch

from blockpilot.constraints.automaton import GrammarError
from blockpilot.constraints.grammar import Grammar
from blockpilot.device import device_name, dtype_name
from blockpilot.engine.engine import Engine
from blockpilot.engine.memory import check_memory
from blockpilot.native.library import fastest_dtype
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt, encode_messages
from blockpilot.types import Request
from jobs.serving.clients import most_of_client
from jobs.serving.constraints.grammars import Calls, Grammars
from jobs.serving.constraints.tools import CallReader, Tool, family_of, in_words, knows_tools, without_system
from jobs.serving.engine_loop import EngineLoop, Stream, on_passing_thread
from jobs.serving.fields import ApiError
from jobs.serving.messages import shown
from jobs.serving.metrics import ReplicaMetrics
from jobs.serving.policies import PolicyInUse
from jobs.serving.replies import Reply
from jobs.serving.schema import Body, ChatRequest, Objects

DEFAULT_MAX_LENGTH = 2048
MOST_CHUNKS = 100.0  # per second over all streams; each holds the interpreter lock (GIL) for a millisecond
MAX_PROMPT_LOGPROBS = 2**18  # of a response: converting them takes half a second of the event loops
STACK_BYTES = 2**24  # of threads; the compiler of grammars recurses (four times the stack of trial.py)
SWITCH_INTERVAL_S = 0.0002  # latency of the engine's thread in getting the interpreter lock; Python's default is 5 ms
log = logging.getLogger("ray.serve.blockpilot")  # Serve adds the request id


class Replica:
    """Server of the pair that `load` returns: an engine loop that answers request bodies, and its policy.

    Serve runs this class. name: in responses and metrics, by default the target's. num_threads: torch threads, with
    the reason why_threads in /health. num_slots: requests decoded together. max_length: tokens of prompt and answer.
    max_new_tokens: limit of an answer. prefix_tokens: size of the prefix cache, by default as many as the slots hold.
    stream_interval_s: minimum seconds between two chunks of a stream, 0 for a chunk at every step. Raises ValueError
    if the caches do not fit into memory.
    """

    def __init__(
        self,
        load: Callable[[], Pair],
        *,
        name: str | None = None,
        num_threads: int = 1,
        why_threads: str = "requested",
        num_slots: int = 8,
        max_length: int | None = None,
        max_prefill_tokens: int = 256,
        max_queue: int = 64,
        max_new_tokens: int | None = None,
        prefix_tokens: int | None = None,
        stream_interval_s: float = 0.0,
        logs_prompts: bool = False,
    ) -> None:
        torch.set_num_threads(num_threads)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.stack_size(STACK_BYTES)

        def start() -> Engine:
            pair = load()
            length = max_length or min(DEFAULT_MAX_LENGTH, pair.max_length)
            num_prefix_tokens = num_slots * length if prefix_tokens is None else prefix_tokens
            check_memory(pair, num_slots, length, num_prefix_tokens)
            return Engine(
                pair,
                num_slots=num_slots,
                max_length=length,
                max_prefill_tokens=max_prefill_tokens,
                prefix_tokens=num_prefix_tokens,
            )

        engine = on_passing_thread(start)
        self.pair = pair = engine.pair
        self.name = name or pair.id.target
        self._settings: dict[str, object] = {
            "dtype": dtype_name(pair.target.dtype),
            "num_threads": num_threads,
            "chosen": {"dtype": why_dtype(pair), "num_threads": why_threads},
            "exactness": engine.exactness,
            "switched_off": engine.switched_off,
        }
        sizes = {"num_slots": num_slots, "max_length": engine.max_length, "cache_bytes": engine.cache_bytes}
        log.info("engine", extra={"model": self.name, **sizes, **self._settings})
        self.loop = EngineLoop(engine, max_queue=max_queue)
        self.policy = PolicyInUse(pair, self.loop)
        self._metrics = ReplicaMetrics(self.name, self.loop, self.policy.champion)
        self.loop.on_step = self._metrics.on_step
        self._max_new_tokens, self._logs_prompts = max_new_tokens, logs_prompts
        self._stream_interval_s = stream_interval_s
        self._grammars = Grammars(self.pair)

    def close(self) -> None:
        """Stop the threads; requests in flight end with status 503."""
        self.policy.stop()
        self.loop.close()
        self._grammars.close()
        self._metrics.stop()

    # --- requests ---

    async def answer(self, body: Body, client: str = "") -> Objects:
        """Objects of the response: one, or the chunks of a stream; closing the generator early frees its rows.

        client: name of the client, "" if clients are not distinguished; clients get rows round robin.

        An error is yielded as the last object, an ApiError: Serve treats a raised error as a broken replica.
        """
        started = time.monotonic()
        try:
            stream, tools = await self._submit(body, client)
            family, requests = family_of(chat_template(self.pair)), stream.requests
            readers = [CallReader(family, tools) if tools else None for _ in requests]
            reply = Reply(body, requests, self.name, self.pair, self._interval, readers)
            with self._recorded(reply, started), closing(stream):
                async for number, step in stream:
                    for chunk in reply.take(number, step):
                        yield chunk
            if (last := reply.last()) is not None:
                yield last
        except ApiError as error:
            yield error

    async def status(self) -> dict[str, Any]:
        """The model's entry in /health."""
        loop, engine = self.loop, self.loop.engine
        return {
            "status": "ok" if loop.healthy else "stalled" if loop.stalled else "failed",
            "target": self.pair.id.target,
            "draft": self.pair.id.draft,
            "policy": self.policy.status,
            "device": device_name(self.pair.target.device),
            **self._settings,
            "step_price_s": engine.controller.price.by_name,
            "drafting": engine.controller.drafts,
            "num_in_flight": loop.num_in_flight,
            "num_active": engine.num_active,
            "capacity": loop.capacity,
            "num_slots": engine.num_slots,
            "max_model_len": engine.max_length,
            "max_completion_tokens": min(self._max_new_tokens or engine.max_length, engine.max_length - 1),
            "cache_bytes": engine.cache_bytes,
            "num_kept_tokens": engine.num_kept_tokens,
            "pid": os.getpid(),
        }

    def _interval(self) -> float:
        """Seconds between two chunks of a stream at the current load."""
        minimum = self._stream_interval_s
        return max(minimum, self.loop.num_in_flight / MOST_CHUNKS) if minimum else 0.0

    def check_health(self) -> None:
        """Raise RuntimeError if the engine is broken; Serve then replaces the replica."""
        if not self.loop.healthy:
            raise RuntimeError("the engine is broken")

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Use another policy (PolicyInUse.configure); Serve calls this once before the first request."""
        self.policy.configure(user_config)

    async def _submit(self, body: Body, client: str) -> tuple[Stream, tuple[Tool, ...]]:
        """Start decoding all choices; returns the stream of their steps, and the tools that they may call.

        Raises ApiError 400, and the errors of `EngineLoop.submit`.
        """
        if body.num_choices > (most := most_of_client(self.loop.capacity, alone=not client)):
            field = "n" if body.num_choices == body.n else body.prompt_field
            message = f"{field}: {body.num_choices} choices requested; at most {most} are in flight"
            raise ApiError(400, message, field, "too_many_choices")
        self.loop.check_room(body.num_choices, client)  # before any work
        try:
            requests = await asyncio.to_thread(self._requests, body)  # tokenizing a long prompt takes time
            tools: tuple[Tool, ...] = ()
            for structure, field in self._structures(body):  # the last structure constrains the text
                try:
                    constraint, tools = await self._grammars.compile(structure)
                except GrammarError as error:
                    raise ApiError(400, f"{field}: {error}", field, "invalid_grammar") from None
                requests = [replace(request, constraint=constraint) for request in requests]
            return self.loop.submit(requests, client), tools
        except ValueError as error:
            first_word = str(error).partition(" ")[0].rstrip(":")
            param = first_word if first_word in type(body).model_fields else body.prompt_field
            raise ApiError(400, str(error), param) from None

    @contextmanager
    def _recorded(self, reply: Reply, started: float) -> Iterator[None]:
        """Log and count a request at its end; `started` is its arrival (time.monotonic)."""
        outcome = "cancelled"
        try:
            yield
            outcome = "finished"
        except Exception:
            outcome = "failed"
            raise
        finally:
            answered = reply.answered(outcome, started)
            prompt = {"prompt": reply.body.prompt_text} if self._logs_prompts else {}
            log.info("answered", extra={"log_to_stderr": False, **answered._asdict(), **prompt})
            self._metrics.on_answer(answered)

    def _structures(self, body: Body) -> list[tuple[Grammar | Calls, str]]:
        """The requested grammar, then the tool calls in the model's format; each with the name of its field."""
        structures: list[tuple[Grammar | Calls, str]] = []
        if body.grammar is not None:
            structures.append((body.grammar, body.grammar_field))
        if isinstance(body, ChatRequest) and body.callable_tools:
            family, tools = family_of(chat_template(self.pair)), tuple(body.callable_tools)
            structures.append((Calls(family, tools, body.must_call, body.parallel_tool_calls, body.grammar), "tools"))
        return structures

    def _requests(self, body: Body) -> list[Request]:
        """A request for each choice of each prompt; choice i of a prompt uses the seed plus i."""
        self._check_tokens(body)
        seed = body.seed if body.seed is not None else secrets.randbits(53)  # exact as a double in JSON
        prompts = _encode(body, self.pair)
        _check_prompt_logprobs(body, sum(map(len, prompts)))
        requests = (self._request(body, prompt_ids, seed) for prompt_ids in prompts)
        return [_choice_request(request, i) for request in requests for i in range(body.n)]

    def _request(self, body: Body, prompt_ids: tuple[int, ...], seed: int) -> Request:
        num_prompt_logprobs = (body.num_echo_logprobs, body.prompt_logprobs)
        return Request(
            prompt_ids,
            self._num_tokens(body, len(prompt_ids)),
            body.sampling(seed),
            body.size,
            frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.pair.stop_token_ids),
            tuple(body.stop),
            body.num_logprobs,
            layout=body.layout,
            lookup=body.lookup,
            cache_salt=body.cache_salt,
            min_new_tokens=body.min_tokens,
            num_prompt_logprobs=max((num for num in num_prompt_logprobs if num is not None), default=None),
        )

    def _check_tokens(self, body: Body) -> None:
        """Raise ApiError for a token outside the vocabulary."""
        for name, tokens in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
            if outside := [token for token in tokens if not 0 <= token < self.pair.vocab_size]:
                message = f"{name}: token {outside[0]} is outside the vocabulary, 0 to {self.pair.vocab_size - 1}"
                raise ApiError(400, message, name, "unknown_token")

    def _num_tokens(self, body: Body, num_prompt_tokens: int) -> int:
        """Maximum tokens of the answer; raises ApiError if the requested number does not fit."""
        context, requested, maximum = self.loop.engine.max_length, body.num_tokens_asked, self._max_new_tokens
        requested = 1 if requested == 0 else requested  # the prefill emits one token, which is not shown
        available = context - num_prompt_tokens
        if (requested or 1) > available:
            message = f"this model's maximum context length is {context} tokens; the prompt has {num_prompt_tokens}"
            message += f" and the answer needs {requested or 'at least 1'}"
            if context < self.pair.max_length:
                message += f" (the server's max_length; the model's own limit is {self.pair.max_length})"
            field = body.prompt_field if available < 1 else "max_tokens"
            raise ApiError(400, message, field, "context_length_exceeded")
        if maximum is not None and (requested or 1) > maximum:
            message = f"max_tokens: {requested} requested; this server allows at most {maximum}"
            raise ApiError(400, message, "max_tokens", "max_tokens_exceeded")
        maximum = available if maximum is None else min(available, maximum)
        if requested is None and body.min_tokens > maximum:
            raise ApiError(400, f"min_tokens: {body.min_tokens} requested; there is room for {maximum}", "min_tokens")
        return requested or maximum


def why_dtype(pair: Pair) -> str:
    """Reason of a pair's dtype: the machine's default, or the configuration."""
    best = fastest_dtype(pair.target.device)
    return best.why if dtype_name(pair.target.dtype) == best.name else f"requested; auto: {best.name}, {best.why}"


def chat_template(pair: Pair) -> str | None:
    """The tokenizer's chat template; if it has several, the one for tools."""
    template = pair.tokenizer.chat_template
    return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template


def _check_prompt_logprobs(body: Body, num_prompt_tokens: int) -> None:
    """Raise ApiError for more log probabilities of prompts than a response may have."""
    num = num_prompt_tokens * body.n * ((body.prompt_logprobs or 0) + 1)
    if body.prompt_logprobs is not None and num > MAX_PROMPT_LOGPROBS:
        message = (
            f"prompt_logprobs: {num} log probabilities in all choices; at most {MAX_PROMPT_LOGPROBS} are returned"
        )
        raise ApiError(400, message, "prompt_logprobs", "too_many_logprobs")


def _encode(body: Body, pair: Pair) -> list[tuple[int, ...]]:
    """Token ids of every prompt; raises ValueError for messages that the chat template refuses."""
    if isinstance(body, ChatRequest):
        return [_encode_messages(body, pair)]
    options = {"add_special_tokens": body.add_special_tokens}
    return [tuple(pair.tokenizer(p, **options)["input_ids"] if isinstance(p, str) else p) for p in body.prompt]


def _encode_messages(body: ChatRequest, pair: Pair) -> tuple[int, ...]:
    template, tools = chat_template(pair), [tool.shown for tool in body.tools]
    if body.reasoning_effort != "none" and "reasoning_effort" not in (template or ""):
        message = f"reasoning_effort: {body.reasoning_effort!r} has no effect in this model; allowed: none"
        raise ApiError(400, message, "reasoning_effort")
    in_template = knows_tools(template)
    messages = shown(body.messages) if in_template else in_words(shown(body.messages), tools)
    if template is None:
        turns = tuple(Message(message["role"], message["content"]) for message in messages)
        return Prompt("request", turns).encode(pair.tokenizer)
    shown_tools = tools if in_template else []
    try:
        return encode_messages(pair.tokenizer, messages, shown_tools, body.template_kwargs)
    except ValueError:
        # It may need arguments that are objects, or refuse the system turn with the definitions of the tools.
        in_words_only = without_system(messages) if tools else messages
        other = shown(body.messages, plain=True) if in_template else in_words_only
        if other == messages:
            raise
    return encode_messages(pair.tokenizer, other, shown_tools, body.template_kwargs)


def _choice_request(request: Request, number: int) -> Request:
    """Request of choice `number`: adds `number` to the seed, which wraps around as an int64."""
    seed = (request.sampling.seed + number + 2**63) % 2**64 - 2**63
    return replace(request, sampling=replace(request.sampling, seed=seed))
