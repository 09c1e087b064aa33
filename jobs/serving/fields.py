"""Parts of a request's schema: OpenAI's errors, lenient types, and neutral values of unsupported fields.

Clients send many fields that their users did not set. For unsupported fields, values that change nothing are
accepted; other values are refused by name, since ignoring them would give another text than requested.
"""

import json
from collections.abc import Mapping
from reprlib import Repr
from typing import Annotated, Any

from pydantic import BeforeValidator

RETRY_AFTER_S = 1
WAITING = "waiting_s"  # metric of a replica: age of its oldest request without a first token


class ApiError(Exception):
    """Error response in OpenAI's format; can be pickled."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status, self.message, self.param, self.code = status, message, param, code

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        """WWW-Authenticate or Retry-After, depending on the status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shutting_down() -> ApiError:
    """Error for requests to a server that is shutting down."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


_BRIEF = Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100


def short(value: object) -> str:
    """`repr` of a value, cut at 80 characters."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


MAX_BIASES = 1024
MAX_METADATA = 64  # fields; OpenAI accepts 16


def whole(value: Any) -> Any:
    """Convert integral floats to int, since JSON has one type of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _flag(value: Any) -> Any:
    return bool(value) if type(value) is int and value in (0, 1) else value


Whole = Annotated[int, BeforeValidator(whole)]
Flag = Annotated[bool, BeforeValidator(_flag)]


def _biases(value: Any) -> dict[int, float]:
    """Check and convert a logit_bias object, whose keys are token ids as strings."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"must be an object of at most {MAX_BIASES} token ids, each with a number from -100 to 100")
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"{short(token)} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"token {token} has {short(bias)}; must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def _metadata(value: Any) -> Any:
    is_map = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not is_map or len(value) > MAX_METADATA:
        raise ValueError(f"must be an object of at most {MAX_METADATA} strings")
    return value


Biases = Annotated[dict[int, float], BeforeValidator(_biases)]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]


NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "echo": (False,),  # in chat, an extension of vLLM
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_cache_retention": ("in_memory", "in-memory", "24h"),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    # vLLM
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "detokenize": (True,),
    "documents": ([],),
    "enable_thinking": (False,),  # unless set in chat_template_kwargs
    "include_reasoning": (True, False),  # this server does not separate reasoning
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # special tokens have no text
    "use_beam_search": (False,),
    # SGLang
    "min_new_tokens": (0,),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "thinking": ({"type": "disabled"},),
    # llama.cpp
    "cache_prompt": (True,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "id_slot": (-1,),
    "mirostat": (0,),
    "n_probs": (0,),
    "repeat_penalty": (1,),
    "return_tokens": (False,),
    "timings_per_token": (False,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}


def is_neutral(name: str, value: object) -> bool:
    """True if this value of an unsupported field changes nothing; True and False do not count as 1 and 0."""
    return any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )


def allowed(name: str) -> str:
    """The accepted values of a field in NEUTRAL, for an error message."""
    return " or ".join(json.dumps(value) for value in NEUTRAL[name])
