"""Effects of bias, penalties, min_p and minimum length; test_fuzz.py checks that drafts do not change them."""

import torch

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.engine.penalties import LogitsProcessor
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, PROMPT, run, text_of


def decode(pair: Pair, num: int = 20, **more: object) -> tuple[int, ...]:
    sampling = Sampling(1.0, seed=5, **more)  # type: ignore[arg-type]
    return text_of(run(Engine(pair, max_length=128), [Request(PROMPT, num, sampling, 4)])[0])


def test_each_field_does_what_its_name_says(tiny_pair: Pair) -> None:
    """Bias bans or forces a token, presence prevents repeated tokens, repetition also those of the prompt."""
    plain = decode(tiny_pair)
    assert plain[0] not in decode(tiny_pair, logit_bias={plain[0]: -100.0})
    assert set(decode(tiny_pair, logit_bias={7: 100.0})) == {7}
    text = decode(tiny_pair, presence_penalty=1000.0)
    assert len(set(text)) == len(text) == 20
    # A bias makes all logits positive, so that the penalty lowers those of earlier tokens to nearly 0.
    text = decode(tiny_pair, 60, logit_bias=dict.fromkeys(range(260), 1000.0), repetition_penalty=1e6)
    assert len(set(text) | set(PROMPT)) == len(text) + len(PROMPT)


def test_stop_strings_are_looked_for_after_the_least_length(tiny_pair: Pair) -> None:
    """End of a text of one repeated letter; the stop string is two of them."""
    sampling = Sampling(logit_bias={65: 1000.0})
    letter = tiny_pair.tokenizer.decode([65])
    for least in (0, 3, 12):
        request = Request(PROMPT, 12, sampling, 4, NEVER, (letter * 2,), min_new_tokens=least)
        (steps,) = run(Engine(tiny_pair, max_length=128), [request])
        assert "".join(text for step in steps for text in step.texts) == letter * least
        assert len(text_of(steps)) == min(12, least + 2)
        assert steps[-1].finish_reason == ("stop" if least < 12 else "length")


def test_generate_takes_all_of_them(tiny_pair: Pair) -> None:
    """Parameters by name give the text of a request with the same sampling."""
    fields = {"min_p": 0.01, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    steps = generate(
        tiny_pair, PROMPT, max_new_tokens=20, temperature=1.0, seed=5, logit_bias={9: 2.0}, min_new_tokens=4, **fields
    )
    assert text_of(list(steps)) == decode(tiny_pair, logit_bias={9: 2.0}, **fields)


def test_changed_logits_keep_what_bfloat16_would_lose() -> None:
    request = Request(PROMPT, 4, Sampling(logit_bias=((3, 0.01),)))
    processor = LogitsProcessor.of(request)
    assert processor is not None
    logits = torch.full((1, 260), 30.0, dtype=torch.bfloat16)
    changed_logits = processor(logits, PROMPT, [len(PROMPT)])
    assert changed_logits.dtype == torch.float32
    assert int(changed_logits.argmax()) == 3
    assert logits.eq(30.0).all()  # the target's logits are not changed
