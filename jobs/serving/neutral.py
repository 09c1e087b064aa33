"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's APIs that are not built, and their values that change nothing.

Clients send many fields whether their users set them or not. Such a value is accepted; another one is refused by
name, since ignoring it would give a text that was not asked for.
"""

import json
from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "echo": (False,),  # in chat, as vLLM has it
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
    "enable_thinking": (False,),  # where chat_template_kwargs do not say so
    "include_reasoning": (True, False),  # nothing is taken for reasoning
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # no special token has a text
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
    """True for a value of a field that changes nothing; a bool is none of the numbers that it equals."""
    return any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in NEUTRAL.get(name, ())
    )


def allowed(name: str) -> str:
    """The values of a field of NEUTRAL, for an error."""
    return " or ".join(json.dumps(value) for value in NEUTRAL[name])
