"""Fields beyond OpenAI's: sampling, ends of answers, arguments of the chat template, and lookup."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from blockpilot.engine.engine import Engine
from blockpilot.native.library import has_functions
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.api import ApiClient, served
from helpers.bodies import CHAT, COMPLETIONS, QUESTION, JsonObject, events, text_of
from helpers.engines import run
from helpers.tiny import CHAT_TEMPLATE, EOS_ID

BODY = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}


def library_text(pair: Pair, sampling: Sampling) -> str:
    """Text of BODY, decoded by the library one token at a time."""
    prompt = tuple(pair.tokenizer(BODY["prompt"])["input_ids"])
    request = Request(prompt, 40, sampling, 1)
    (steps,) = run(Engine(pair, num_slots=1, max_length=300), [request])
    return str(pair.tokenizer.decode([t for s in steps for t in s.tokens], skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 0.2},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {65: 5.0, 66: -100.0}},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 0.8},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_each_field_gives_the_librarys_text_at_every_block_size(
    client: ApiClient, tiny_pair: Pair, fields: dict[str, Any], temperature: float
) -> None:
    library_fields = fields | {"logit_bias": tuple(fields.get("logit_bias", {}).items())}
    expected = library_text(tiny_pair, Sampling(temperature=temperature, seed=3, **library_fields))
    for block_size in (1, 4):
        body = BODY | {"temperature": temperature, "block_size": block_size}
        assert text_of(client.ask(COMPLETIONS, body | fields)) == expected
    if temperature or "min_p" not in fields:  # min_p keeps the likeliest token
        assert text_of(client.ask(COMPLETIONS, BODY | {"temperature": temperature})) != expected


def test_stop_tokens_of_the_request_end_it_without_their_text(client: ApiClient, tiny_pair: Pair) -> None:
    whole = client.ask(COMPLETIONS, BODY | {"logprobs": 0})["choices"][0]
    tokens = whole["logprobs"]["tokens"]
    stop = next(token for token in tokens[5:] if token.isascii())
    (stop_id,) = tiny_pair.tokenizer(stop)["input_ids"]
    answer = client.ask(COMPLETIONS, BODY | {"stop_token_ids": [stop_id, 7]})
    index = tokens.index(stop)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == index + 1
    assert whole["text"].startswith(text_of(answer))
    assert not text_of(answer).endswith(stop)
    late_answer = client.ask(COMPLETIONS, BODY | {"stop_token_ids": [stop_id], "min_tokens": index + 2})
    assert late_answer["usage"]["completion_tokens"] >= index + 2
    assert stop not in text_of(late_answer)[: index + 1]  # its probability is 0 until then


def test_ignore_eos_goes_on_to_the_limit_or_the_end_of_a_grammar(client: ApiClient) -> None:
    eos_body = BODY | {"logit_bias": {str(EOS_ID): 100}, "ignore_eos": False}
    endless_body = eos_body | {"ignore_eos": True}
    for body, num, finish_reason in (
        (eos_body, 1, "stop"),
        (endless_body, 40, "length"),
        (endless_body | {"min_tokens": 40}, 40, "length"),
        (endless_body | {"stop_token_ids": [EOS_ID]}, 1, "stop"),
    ):
        answer = client.ask(COMPLETIONS, body)
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (num, finish_reason)
        assert text_of(answer) == ""  # it is a control token
    grammar = client.ask(COMPLETIONS, BODY | {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 30})
    assert text_of(grammar) in ("yes", "no")
    assert grammar["choices"][0]["finish_reason"] == "stop"


def test_a_stream_tells_the_usage_so_far(client: ApiClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.send_body(COMPLETIONS, BODY | {"stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 40)
    assert len(set(counts)) > 5


# --- what the chat template reads ---

TEMPLATE = CHAT_TEMPLATE.replace("<assistant>", "<assistant>{{ note }}{% if enable_thinking %}<think>{% endif %}")
TEMPLATE += "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"


@pytest.fixture(scope="module")
def reader(tiny_pair: Pair) -> Iterator[ApiClient]:
    """Client of a pair whose template reads more than messages, and divides by a request's `zero`."""
    tokenizer = type(tiny_pair.tokenizer)(tokenizer_object=tiny_pair.tokenizer.backend_tokenizer, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE + "{% if zero is defined %}{{ 1 // zero }}{% endif %}"
    with served(replace(tiny_pair, tokenizer=tokenizer), max_length=300) as client:
        yield client


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({}, "<assistant>"),
        ({"chat_template_kwargs": {"note": "!"}}, "<assistant>!"),
        ({"chat_template_kwargs": {"enable_thinking": True, "note": 5}}, "<assistant>5<think>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<assistant>"),
        ({"reasoning_effort": "high"}, "<assistant>(high)"),
        ({"reasoning_effort": "none"}, "<assistant>"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_the_template_reads_what_a_request_hands_it(reader: ApiClient, change: JsonObject, written: str) -> None:
    prompt = f"<user>{QUESTION[0]['content']}\n{written}"
    completion = reader.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 12, "seed": 1})
    answer = reader.ask(CHAT, {"messages": QUESTION, "max_tokens": 12, "seed": 1} | change)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert text_of(answer) == text_of(completion)


@pytest.mark.parametrize("content", ["Once upon", "Once <eos> upon"])
def test_an_answer_can_go_on_with_the_last_message(reader: ApiClient, content: str) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    answer = reader.ask(CHAT, {"messages": messages, "max_tokens": 12, "seed": 1} | options)
    prompt = f"<user>{QUESTION[0]['content']}\n<assistant>{content}"
    assert answer["usage"]["prompt_tokens"] == len(prompt)  # a control token in a text is text


@pytest.mark.parametrize("kwargs", [{"zero": 0}, {"self": 1}])
def test_a_template_that_fails_is_400(reader: ApiClient, kwargs: JsonObject) -> None:
    refused = reader.refusal(CHAT, {"messages": QUESTION, "chat_template_kwargs": kwargs})
    assert "chat template" in refused["message"]


# --- lookup, in usage and in steps ---

REPEATED = {"prompt": "abcabcabc" * 4, "max_tokens": 60, "temperature": 0}
looks_up = pytest.mark.skipif(not has_functions(), reason="texts are indexed by the library in C")


def accepted_proposals(usage: JsonObject) -> tuple[int, int]:
    """Numbers of accepted tokens that were drafted, and that were looked up."""
    return usage["num_accepted_drafted"], usage["num_accepted_looked_up"]


@looks_up
@pytest.mark.parametrize("layout", ["chain", "tree"])
def test_true_looks_up_beside_a_fixed_size_and_null_only_where_steps_choose(client: ApiClient, layout: str) -> None:
    def num_looked_up(**settings: object) -> int:
        return accepted_proposals(client.ask(COMPLETIONS, REPEATED | settings)["usage"])[1]

    fixed = {"block_size": 6, "layout": layout}
    assert num_looked_up(**fixed, lookup=True) > 0
    assert num_looked_up(**fixed) == num_looked_up(**fixed, lookup=None) == 0
    assert num_looked_up(**fixed, lookup=False) == num_looked_up(lookup=False) == 0
    assert num_looked_up(block_size=1, lookup=True) == num_looked_up(max_tokens=1) == 0
    assert num_looked_up(lookup=1) > 0  # 1 is true, as for other flags
    assert num_looked_up() > 0


def steps_and_sources(choices: list[JsonObject]) -> tuple[list[JsonObject], Counter[str]]:
    """Steps of a stream, and the numbers of its accepted tokens by source."""
    steps = [choice["step"] for choice in choices if "step" in choice]
    assert all(len(step["sources"]) == len(step["drafted"]) for step in steps)
    return steps, Counter(step["sources"][node - 1] for step in steps for node in step["path"])


@looks_up
@pytest.mark.parametrize("settings", [{"block_size": 6, "layout": "tree"}, {"block_size": 4}, {"n": 3, "seed": 3}])
def test_usage_counts_the_accepted_tokens_of_the_steps_by_source(client: ApiClient, settings: JsonObject) -> None:
    choices, usage = client.streamed(COMPLETIONS, REPEATED | settings | {"lookup": True}, include_steps=True)
    steps, accepted = steps_and_sources(choices)
    assert accepted.keys() <= {"draft", "lookup", "both"}
    assert accepted["lookup"] + accepted["both"] > 0
    assert accepted_proposals(usage) == (accepted["draft"] + accepted["both"], accepted["lookup"] + accepted["both"])
    num_prefills = settings.get("n", 1)  # which give the first tokens
    # Steps that the length limit cut: their last token is an accepted one, not the target's.
    num_cut = sum(step["block_size"] > 0 and step["num_accepted"] == len(step["texts"]) for step in steps)
    assert accepted.total() == usage["completion_tokens"] - num_prefills - usage["num_steps"] + num_cut


def test_tokens_that_a_constraint_forces_are_no_proposals_of_draft_or_lookup(client: ApiClient) -> None:
    forced = {"structured_outputs": {"choice": ["a text that is forced"]}, "lookup": False}
    choices, usage = client.streamed(COMPLETIONS, REPEATED | forced, include_steps=True)
    assert steps_and_sources(choices)[1].keys() == {"constraint"}
    assert accepted_proposals(usage) == (0, 0)
