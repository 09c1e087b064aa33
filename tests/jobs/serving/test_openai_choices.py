"""Several choices and prompts, echoed prompts, log probabilities, and offsets of tokens in the text."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from blockpilot.pairs.loading import Pair
from blockpilot.types import TokenLogprobs
from helpers.api import ApiClient, served
from helpers.bodies import CHAT, COMPLETIONS, PROMPTS, QUESTION, JsonObject, shown, text_of
from helpers.tiny import EOS_ID, byte_fallback_tokenizer
from helpers.vocabularies import byte_fallback, byte_fallback_bytes, byte_level, byte_level_bytes
from jobs.serving.answer import ScoredToken, TokenReader, unique_names

NAMES = ("<pad>", "<mask>", "<unused>")  # of special tokens, which have no text
TEXTS = ["Once upon a time", "Two", "A block of tokens"]


# --- choices, each the text of its own seed ---


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("seed", [5, 2**63 - 2])
def test_choices_are_those_of_following_seeds(client: ApiClient, path: str, seed: int) -> None:
    body = {"max_tokens": 25, "seed": seed, "block_size": 4, **PROMPTS[path]}
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(3)]  # they wrap around
    alone = [client.ask(path, body | {"seed": seed}) for seed in seeds]
    together = client.ask(path, body | {"n": 3})
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    texts = [text_of({"choices": [choice]}) for choice in together["choices"]]
    assert texts == [text_of(answer) for answer in alone]
    assert len(set(texts)) == 3
    usage = together["usage"]
    for name in ("completion_tokens", "num_steps"):
        assert usage[name] == sum(answer["usage"][name] for answer in alone)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["acceptance_length"] == pytest.approx((usage["completion_tokens"] - 3) / usage["num_steps"])

    chunks, streamed_usage = client.streamed(path, body | {"n": 3})
    assert streamed_usage == usage
    for i in range(3):
        choices = [choice for choice in chunks if choice["index"] == i]
        assert shown(choices) == texts[i]
        *finish_reasons, last = [choice["finish_reason"] for choice in choices]
        assert (set(finish_reasons), last) == ({None}, alone[i]["choices"][0]["finish_reason"])
        if path == CHAT:
            assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)


def test_all_choices_or_none(tiny_pair: Pair) -> None:
    """Request for seven choices refused by a server with six places; it takes none of them."""
    body, prompts = {"prompt": "x"}, ["x"] * 7
    changes = [({"n": 7}, "n"), ({"prompt": prompts}, "prompt"), ({"prompt": prompts[:4], "n": 2}, "prompt")]
    with served(tiny_pair, num_slots=4, max_length=300, max_queue=2) as client:
        for change, param in changes:
            assert "at most 6" in client.refusal(COMPLETIONS, body | change, param)["message"]
        assert len(client.ask(COMPLETIONS, body | {"n": 6, "best_of": 6})["choices"]) == 6


@pytest.mark.parametrize("block_size", [1, 4])
def test_chat_log_probabilities(client: ApiClient, block_size: int) -> None:
    body = {"max_tokens": 20, "seed": 1, "block_size": block_size, **PROMPTS[CHAT]}
    body |= {"logprobs": True, "top_logprobs": 3}
    (choice,) = client.ask(CHAT, body)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 20
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        values = [likely["logprob"] for likely in token["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= token["logprob"]
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        for named in (token, *token["top_logprobs"]):
            assert bytes(named["bytes"]).decode(errors="replace") == named["token"]
    data = b"".join(bytes(token["bytes"]) for token in content if token["token"] not in NAMES)
    assert data.decode(errors="replace") == choice["message"]["content"]
    chunks, _ = client.streamed(CHAT, body)
    pieces = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert [token["token"] for token in pieces] == [token["token"] for token in content]
    assert [token["logprob"] for token in pieces] == pytest.approx([token["logprob"] for token in content], abs=1e-4)
    unscored_answer = client.ask(CHAT, body | {"logprobs": False, "top_logprobs": None})
    assert unscored_answer["choices"][0]["logprobs"] is None
    (taken_only,) = client.ask(CHAT, body | {"top_logprobs": None})["choices"]
    assert {len(token["top_logprobs"]) for token in taken_only["logprobs"]["content"]} == {0}


def check_offsets(choice: JsonObject) -> None:
    """Check that whole tokens are at their offsets, and that offsets ascend."""
    logprobs, text = choice["logprobs"], choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "\ufffd" not in token and token not in NAMES:
            assert text[offset : offset + len(token)] == token
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_text_of_half_characters_is_one_at_every_block_size(tiny_pair: Pair, kind: str) -> None:
    """Same text of characters of one to four bytes, the last one cut, streamed or not, with stop strings or not."""
    pair = replace(tiny_pair, tokenizer=byte_fallback_tokenizer()) if kind == "byte-fallback" else tiny_pair
    body = {"prompt": [10, 20, 30], "seed": 1, "logprobs": 5}
    body |= {"structured_outputs": {"regex": "(\U0001f642|\U0001f643|\u4f60|\u00e9|a){40}"}}
    with served(pair, num_slots=2, max_length=300) as client:
        ends = set()
        for num in range(8, 14):
            limited = body | {"max_tokens": num}
            choice = client.ask(COMPLETIONS, limited | {"block_size": 1})["choices"][0]
            text, logprobs = choice["text"], choice["logprobs"]
            ends.add(text[-1])
            assert "\ufffd" not in text[:-1]
            assert [len(top) for top in logprobs["top_logprobs"]] == [5] * num
            check_offsets(choice)
            for size, stop in ((1, ["zz"]), (4, []), (4, ["zz", "\U0001f642z"])):
                drafting = limited | {"block_size": size, "stop": stop}
                drafted_choice = client.ask(COMPLETIONS, drafting)["choices"][0]
                chunks, _ = client.streamed(COMPLETIONS, drafting)
                assert (drafted_choice["text"], shown(chunks)) == (text, text)
                parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
                for name in ("tokens", "text_offset"):
                    assert drafted_choice["logprobs"][name] == logprobs[name]
                    assert [value for part in parts for value in part[name]] == logprobs[name]
        assert "\ufffd" in ends


# --- several prompts, and echoed prompts ---


def target_logprobs(pair: Pair, tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities [tokens - 1, vocab] of every token after the first, by one pass of the stock model."""
    return pair.target(torch.tensor([tokens])).logits[0, :-1].log_softmax(dim=-1)


def as_ids(pair: Pair, prompts: Sequence[str]) -> list[list[int]]:
    return [list(pair.tokenizer(prompt)["input_ids"]) for prompt in prompts]


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_are_answered_as_each_is_alone(client: ApiClient, tiny_pair: Pair, n: int) -> None:
    body = {"max_tokens": 12, "seed": -5, "n": n, "logprobs": 1}
    alone = [client.ask(COMPLETIONS, body | {"prompt": prompt}) for prompt in TEXTS]
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    ids = as_ids(tiny_pair, TEXTS)
    for prompt in (ids[0], [ids[0]], TEXTS[:1]):
        choices = client.ask(COMPLETIONS, body | {"prompt": prompt})["choices"]
        assert [choice["text"] for choice in choices] == expected[:n]
    assert (alone[0]["object"], alone[0]["model"], alone[0]["seed"]) == ("text_completion", tiny_pair.id.target, -5)
    for prompts in (TEXTS, ids, [ids[0], *TEXTS[1:]]):
        together = client.ask(COMPLETIONS, body | {"prompt": prompts})
        assert [choice["index"] for choice in together["choices"]] == list(range(3 * n))
        assert [choice["text"] for choice in together["choices"]] == expected
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)
        assert together["usage"]["prompt_tokens"] == sum(map(len, ids))
    chunks, usage = client.streamed(COMPLETIONS, body | {"prompt": TEXTS})
    assert [shown([chunk for chunk in chunks if chunk["index"] == i]) for i in range(3 * n)] == expected
    assert usage["total_tokens"] == together["usage"]["total_tokens"]


def test_a_prompt_without_the_tokenizers_special_tokens(tiny_pair: Pair) -> None:
    """Special token at the beginning of a text, as Llama's tokenizer adds it, left out on request."""
    tokenizer = type(tiny_pair.tokenizer)(tokenizer_object=tiny_pair.tokenizer.backend_tokenizer, eos_token="<eos>")
    processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS_ID)])
    tokenizer.backend_tokenizer.post_processor = processor
    try:
        with served(replace(tiny_pair, tokenizer=tokenizer)) as client:
            changes = ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
            answers = [client.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 1} | change) for change in changes]
    finally:
        tokenizer.backend_tokenizer.post_processor = None
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [5, 5, 4]


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_echo_shows_prompts_and_their_log_probabilities(client: ApiClient, tiny_pair: Pair, max_tokens: int) -> None:
    """lm-eval sends such bodies with max_tokens 1, whose token must be returned even if it is a stop token. It counts
    a prompt token as greedy if its log probability is the highest; the last prompt ends with greedy tokens.
    """
    ids = as_ids(tiny_pair, TEXTS)
    for _ in range(6):
        ids[2].append(int(tiny_pair.target(torch.tensor([ids[2]])).logits[0, -1].argmax()))
    body = {"max_tokens": max_tokens, "temperature": 0, "prompt": ids}
    body |= {"logit_bias": {str(EOS_ID): 100}} if max_tokens == 1 else {}
    answer = client.ask(COMPLETIONS, body | {"echo": True, "logprobs": 3})
    assert answer["usage"]["completion_tokens"] == 3 * max_tokens
    for choice, tokens in zip(answer["choices"], ids, strict=True):
        logprobs, num = choice["logprobs"], len(tokens)
        assert {len(column) for column in logprobs.values()} == {num + max_tokens}
        assert choice["text"].startswith(tiny_pair.tokenizer.decode(tokens[:3]))
        assert logprobs["text_offset"][:3] == [0, 1, 2]
        (no_logprob, *values), (no_top, *top) = logprobs["token_logprobs"][:num], logprobs["top_logprobs"][:num]
        assert (no_logprob, no_top) == (None, None)
        expected = target_logprobs(tiny_pair, tokens)
        assert values == pytest.approx(expected[torch.arange(num - 1), tokens[1:]].tolist(), abs=1e-4)
        for row, likeliest in zip(expected.topk(3).values, top, strict=True):
            assert likeliest
            assert all((row - value).abs().min() < 1e-4 for value in likeliest.values())
        is_likeliest = [value == max(likely.values()) for value, likely in zip(values, top, strict=True)]
        assert is_likeliest == (expected.argmax(dim=-1) == torch.tensor(tokens[1:])).tolist()
    assert is_likeliest[-6:] == [True] * 6
    unscored_choices = client.ask(COMPLETIONS, body | {"echo": max_tokens == 0})["choices"]
    assert [choice["logprobs"] for choice in unscored_choices] == [None] * 3
    if max_tokens:
        for choice, unscored_choice, prompt in zip(answer["choices"], unscored_choices, TEXTS, strict=True):
            assert choice["text"].startswith(prompt)
            assert choice["text"].endswith(unscored_choice["text"])


def test_a_stream_begins_with_the_prompt(client: ApiClient) -> None:
    body = {"prompt": TEXTS, "max_tokens": 7, "seed": 2, "echo": True, "logprobs": 1, "n": 2}
    whole = client.ask(COMPLETIONS, body)
    chunks, _ = client.streamed(COMPLETIONS, body)
    for choice in whole["choices"]:
        parts = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert shown(parts) == choice["text"]
        assert choice["text"].startswith(TEXTS[choice["index"] // 2])
        for name in ("tokens", "text_offset"):
            values = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
            assert values == choice["logprobs"][name]
    empty_chunks, _ = client.streamed(COMPLETIONS, body | {"max_tokens": 0})
    assert [choice["finish_reason"] for choice in empty_chunks].count("length") == 6


def test_an_echo_fills_the_context(client: ApiClient) -> None:
    """Prompt of 299 tokens, plus the one that every request decodes, fills the context; one more does not fit."""
    body = {"max_tokens": 0, "echo": True, "logprobs": 1}
    answer = client.ask(COMPLETIONS, body | {"prompt": [65] * 299})
    assert answer["usage"]["total_tokens"] == 299
    client.refusal(COMPLETIONS, body | {"prompt": [65] * 300})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("num", [0, 2])
def test_prompt_log_probabilities_by_token_id_as_vllm_has_them(
    client: ApiClient, tiny_pair: Pair, path: str, num: int
) -> None:
    answer = client.ask(path, {"max_tokens": 3, "prompt_logprobs": num} | PROMPTS[path])
    rows = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    text = f"<user>{QUESTION[0]['content']}\n<assistant>" if path == CHAT else PROMPTS[path]["prompt"]
    (ids,) = as_ids(tiny_pair, [text])
    assert rows[0] is None
    assert len(rows) == len(ids)
    expected = target_logprobs(tiny_pair, ids)
    for i, row in enumerate(rows[1:], 1):
        token_entry = row[str(ids[i])]
        assert token_entry["logprob"] == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-4)
        assert token_entry["decoded_token"] == text[i]
        assert num <= len(row) <= num + 1
        if num:
            likeliest = [token["logprob"] for token in row.values() if token["rank"] == 1]
            assert likeliest == pytest.approx([float(expected[i - 1].max())], abs=1e-4)


def test_the_log_probabilities_of_a_prompt_are_converted_once(
    client: ApiClient, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices of a prompt share its entries, and a token is decoded once; otherwise other requests would wait."""
    decoded, decode = list[int](), tiny_pair.tokenizer.decode

    def counted(ids: list[int], **options: Any) -> str:
        decoded.extend(ids)
        return str(decode(ids, **options))

    monkeypatch.setattr(tiny_pair.tokenizer, "decode", counted)
    body = {"prompt": ["a" * 200, "b" * 200], "n": 3, "max_tokens": 1, "prompt_logprobs": 20}
    choices = client.ask(COMPLETIONS, body)["choices"]
    assert len(set(decoded)) == len(decoded)
    for start in (0, 3):
        assert len(choices[start]["prompt_logprobs"]) == 200
        assert choices[start]["prompt_logprobs"] == choices[start + 2]["prompt_logprobs"]


def test_more_log_probabilities_of_prompts_than_a_response_has_are_refused(tiny_pair: Pair) -> None:
    body = {"prompt": [[65] * 299] * 60, "max_tokens": 1}
    with served(tiny_pair, num_slots=1, max_length=300) as client:
        message = client.refusal(COMPLETIONS, body | {"prompt_logprobs": 20}, "prompt_logprobs")["message"]
        assert f"{60 * 299 * 21} log probabilities" in message
        client.ask(COMPLETIONS, body | {"prompt": body["prompt"][:2], "prompt_logprobs": 20})


def test_a_prompt_with_log_probabilities_is_the_same_when_its_keys_and_values_were_kept(client: ApiClient) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 2, "temperature": 0}
    client.ask(COMPLETIONS, body)
    plain = client.ask(COMPLETIONS, body)
    echo = client.ask(COMPLETIONS, body | {"echo": True, "logprobs": 0})
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert echo["choices"][0]["text"] == body["prompt"] + plain["choices"][0]["text"]
    assert None not in echo["choices"][0]["logprobs"]["token_logprobs"][1:]


# --- offsets of tokens in the text, against a slow reference, and unique names of tokens ---

BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
SPELLED = {id(BYTE_LEVEL): byte_level_bytes, id(BYTE_FALLBACK): byte_fallback_bytes}


def characters_of_bytes(data: bytes) -> list[int]:
    """Index of the character of each byte; invalid bytes decode to U+FFFD."""
    return [len(data[: end + 1].decode(errors="replace")) - 1 for end in range(len(data))]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_token_is_where_its_first_byte_is(tokenizer: object, data: st.DataObject) -> None:
    """Offset of a token is that of its first byte: random bytes, special tokens, and ids without a token."""
    bytes_of = SPELLED[id(tokenizer)]
    halves = [tokenizer.encode(char) for char in "é你🙂"]
    halves = [ids[:num] for ids in halves for num in range(1, len(ids) + 1)]
    parts = st.lists(st.sampled_from(halves) | st.integers(0, len(tokenizer) + 3).map(lambda token: [token]))
    tokens = [token for part in data.draw(parts) for token in part]
    reader, spelled, lengths = TokenReader(tokenizer), b"", []
    token_reads = [reader.read(token, TokenLogprobs(-1.0, ((token, -1.0),))) for token in tokens]
    for token, token_read in zip(tokens, token_reads, strict=True):
        lengths.append(len(bytes_of(tokenizer, tokens[: len(lengths) + 1])))
        added = token_read.scored.data if lengths[-1] > len(spelled) else b""
        assert token_read.likeliest == (ScoredToken(token, token_read.scored.data, -1.0),)
        spelled += added
    assert spelled == bytes_of(tokenizer, tokens)
    characters = characters_of_bytes(spelled)
    for first, length, token_read in zip([0, *lengths], lengths, token_reads, strict=False):
        if length > first:
            assert token_read.offset == characters[first]


def test_special_tokens_have_a_name_and_no_characters() -> None:
    end, reader = BYTE_LEVEL.eos_token_id, TokenReader(BYTE_LEVEL)
    tokens = [*BYTE_LEVEL.encode("ab"), end, len(BYTE_LEVEL) + 7, *BYTE_LEVEL.encode("c")]
    token_reads = [reader.read(token, None) for token in tokens]
    assert [token_read.scored.data for token_read in token_reads] == [b"a", b"b", b"<|end|>", b"", b"c"]
    assert [token_read.offset for token_read in token_reads] == [0, 1, 2, 2, 2]
    assert {token_read.scored.logprob for token_read in token_reads} == {None}


def test_names_lose_no_token() -> None:
    tokens = [(1, b"a"), (2, b"\xf0\x9f"), (3, b"\xf0"), (4, b"a"), (5, b" \xe2"), (6, b"\xf0"), (7, b"")]
    names = unique_names(ScoredToken(token, data, -float(token)) for token, data in tokens)
    expected = ["a", "bytes:\\xf0\\x9f", "bytes:\\xf0", "token_id:4", "bytes: \\xe2", "token_id:6", ""]
    assert names == {name: -float(token) for token, name in enumerate(expected, start=1)}
