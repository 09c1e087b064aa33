"""Requests from lists, tensors, arrays and encodings of token ids; other values are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, token_ids
from helpers.engines import NEVER, run, text_of
from helpers.tiny import byte_tokenizer

IDS = (40, 41, 42)
MESSAGES = [{"role": "user", "content": "hi"}]
FORMS: dict[str, Any] = {
    "list": list(IDS),
    "range": range(40, 43),
    "iterator": iter(IDS),
    "list of one": [list(IDS)],
    "tensor": torch.tensor(IDS),
    "int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "tensor [1, n]": torch.tensor([IDS]),
    "list of tensors": [torch.tensor(i) for i in IDS],
    "array": np.array(IDS),
    "array [1, n]": np.array([IDS], dtype=np.uint16),
    "dictionary": {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, 3)[:, :3].long()},
    "encoding": BatchEncoding({"input_ids": list(IDS), "attention_mask": [1, 1, 1]}),
}
WRONG: dict[str, tuple[Any, str]] = {
    "text": ("Why is the sky blue?", r"prompt_ids 'Why is the sky blue\?': is text; encode it by pair.tokenizer"),
    "messages": (MESSAGES, "prompt_ids with .*'role'.*: must be token ids"),
    "texts": (["a", "b"], "prompt_ids with 'a': must be token ids, whole numbers"),
    "several": ([[1, 2], [3, 4]], "prompt_ids of 2 texts: must be those of one"),
    "floats": ([1.0, 2.0], "with 1.0: must be token ids"),
    "booleans": ([True, 1], "with True"),
    "number": (5, "prompt_ids 5: must be a sequence"),
    "nothing": (None, "prompt_ids None"),
    "padding": ({"input_ids": [1, 2, 256], "attention_mask": [1, 1, 0]}, "padding"),
    "no ids": ({"attention_mask": [1]}, "prompt_ids None"),
}


@pytest.mark.parametrize("form", FORMS)
def test_token_ids_of_every_form(form: str) -> None:
    prompt_ids = Request(FORMS[form], 4).prompt_ids
    assert prompt_ids == IDS
    assert {type(token) for token in prompt_ids} == {int}


@pytest.mark.parametrize("form", WRONG)
def test_what_is_no_prompt_is_named(form: str, tiny_pair: Pair) -> None:
    given, message = WRONG[form]
    with pytest.raises(ValueError, match=message):
        Request(given, 4)
    with pytest.raises(ValueError, match=message):
        generate(tiny_pair, given)  # in the call, not at the first step


def test_what_a_chat_template_returns_is_a_prompt(tiny_pair: Pair) -> None:
    tokenizer = byte_tokenizer()
    expected = tuple(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))
    forms: list[dict[str, Any]] = [{}, {"return_tensors": "pt"}, {"return_tensors": "np"}]
    for form in (*forms, {"return_tensors": "pt", "return_dict": False}):
        assert token_ids(tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, **form)) == expected
    assert token_ids(tokenizer("<user>hi\n<assistant>", return_tensors="pt")) == expected
    texts = [text_of(list(generate(tiny_pair, ids, max_new_tokens=8))) for ids in (expected, torch.tensor(expected))]
    assert texts[0] == texts[1]


def test_stops_are_taken_as_they_are_written(tiny_pair: Pair) -> None:
    (steps,) = run(Engine(tiny_pair), [Request([40, 41], 12, stop_token_ids=NEVER)])
    tokens = text_of(steps)
    for stops in ([tokens[5]], {tokens[5]}, torch.tensor([tokens[5]]), (np.int64(tokens[5]),)):
        request = Request([40, 41], 12, stop_token_ids=stops)  # type: ignore[arg-type]
        assert text_of(run(Engine(tiny_pair), [request])[0]) == tokens[: tokens.index(tokens[5]) + 1]
    assert Request([1], 1, stop_strings="\n\n").stop_strings == ("\n\n",)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stop_token_ids 7: must be a sequence"):
        Request([1], 1, stop_token_ids=7)  # type: ignore[arg-type]


def test_an_engine_without_sizes_fits_its_pair_and_a_step_shows_no_tensors(tiny_pair: Pair) -> None:
    assert Engine(tiny_pair).max_length == tiny_pair.max_length == 1024
    first = next(generate(tiny_pair, [40, 41], max_new_tokens=4))
    assert first.prefill is not None
    assert "tensor" not in repr(first)
