"""Sweeps in one process: against decoding one prompt at a time, against known answers, and rejects."""

import copy
import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt, load_prompts
from blockpilot.sweep.rows import (
    MIN_PROB,
    Metadata,
    Outcome,
    candidates_around,
    prompt_ids,
    validate,
    vectors,
    write_rows,
)
from blockpilot.sweep.summary import Summary, fewest_steps
from blockpilot.sweep.sweep import sampler_seed, sweep_prompts
from blockpilot.sweep.trees import emitted_along
from blockpilot.types import Step
from helpers.sweeps import read_sweep
from helpers.tiny import MASK_ID, tiny_draft, tiny_target

replay, decode = sweep_prompts, partial(sweep_prompts, method="decode")


@pytest.fixture(scope="module")
def parrot(tiny_pair: Pair) -> Pair:
    """Target that (at T > 0: probably) repeats its last token; draft that always proposes '>', the template's last.

    Layers add nothing, so logits are products with the last token's embedding; the mask's is half that of '>'.
    """
    target = tiny_target().eval().requires_grad_(False)
    draft = tiny_draft(target).eval().requires_grad_(False)
    with torch.no_grad():
        for model in (target, draft):
            for name, parameter in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    parameter.zero_()
        (last,) = tiny_pair.tokenizer(">")["input_ids"]
        embedding = target.get_input_embeddings().weight
        embedding[MASK_ID] = embedding[last] / 2
    return dataclasses.replace(tiny_pair, target=target, draft=draft)


def prompts(num: int) -> list[Prompt]:
    return load_prompts("demo", num)


def about(pair: Pair, candidates: list[int]) -> Metadata:
    return Metadata({}, pair.id, "float32", pair.vocab_size, pair.block_size, candidates, {}, "")


def stopping_at(pair: Pair, token: int) -> Pair:
    stopping = dataclasses.replace(pair, target=copy.copy(pair.target))
    stopping.target.generation_config = copy.deepcopy(pair.target.generation_config)
    stopping.target.generation_config.eos_token_id = [token]
    return stopping


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_sweep_equals_decoding_everything_alone(parrot: Pair, temperature: float) -> None:
    """Rows equal those of the reference `generate`, one prompt and block size at a time."""
    asked, candidates = prompts(4), [1, 2, 4, 7]
    settings = {"max_new_tokens": 30, "temperature": temperature}
    decoded = decode(parrot, asked, candidates, num_slots=3, **settings)
    assert not decoded.rejects
    for row, prompt in zip(decoded.rows, asked, strict=True):
        assert (row.prompt, row.texts_agree) == (prompt.text, True)
        ids = prompt.encode(parrot.tokenizer)
        for i, block_size in enumerate(candidates):
            steps = list(generate(parrot, ids, block_size=block_size, seed=row.seed, **settings))  # type: ignore[arg-type]
            emitted = [len(step.tokens) for step in steps[1:]]
            assert row.output_tokens == [token for step in steps for token in step.tokens]
            assert row.num_steps[i] == len(emitted)
            assert row.emitted_histograms[i] == [emitted.count(n) for n in range(block_size + 1)]
            assert row.taus[i] == sum(emitted) / len(emitted)
    taus = Summary().add(decoded.rows).tau_curve
    assert taus[1] == 1.0
    if temperature:  # the draft is right often, but not always
        assert 1.1 < taus[2] < 2
        assert taus[2] < taus[7] < 6
    for how in ({"num_slots": 3}, {"num_slots": 16}, {"num_slots": 3, "text_block_size": 4}):
        replayed = replay(parrot, asked, candidates, **settings, **how)
        assert [dataclasses.replace(row, context=[]) for row in replayed.rows] == [
            dataclasses.replace(row, context=[]) for row in decoded.rows
        ]


def known_before(pair: Pair, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Context vector before the anchor (the last token) and the anchor's embedding, by the stock model."""
    states = pair.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    layers = pair.draft.options.target_layer_ids
    context = pair.draft.fuse(torch.cat([states[i + 1][0, -2] for i in layers]))
    return context, pair.target.get_input_embeddings().weight[tokens[-1]]


@pytest.mark.parametrize(("temperature", "num_slots"), [(0.0, 2), (0.7, 16)])
def test_a_dense_sweep_shows_what_is_known_before_its_steps(
    tiny_pair: Pair, temperature: float, num_slots: int, tmp_path: Path
) -> None:
    asked, candidates = prompts(3), [1, 3, 6]
    settings = {"max_new_tokens": 30, "temperature": temperature, "num_slots": num_slots}
    rows = replay(tiny_pair, asked, candidates, method="dense", step_samples=7, **settings).rows
    for row, prompt in zip(rows, asked, strict=True):
        num_anchors = len(row.output_tokens) - 1
        # The last five anchors of an answer that ends by length have less than a block of 6 left.
        last = num_anchors - (6 if row.finish_reason == "length" else 1)
        assert row.step_places == list(range(row.step_places[0], row.step_places[0] + 7))
        assert 0 <= row.step_places[0] < row.step_places[-1] <= last
        recorded = zip(vectors(row.step_contexts, 7), vectors(row.step_embeddings, 7), strict=True)
        for place, vectors_of_step in zip(row.step_places, recorded, strict=True):
            text = (*prompt.encode(tiny_pair.tokenizer), *row.output_tokens[: place + 1])
            for vector, expected in zip(vectors_of_step, known_before(tiny_pair, text), strict=True):
                as_float32 = torch.from_numpy(vector.astype("f4"))  # from float16
                torch.testing.assert_close(as_float32, expected, rtol=1e-3, atol=1e-3)
    assert "length" in {row.finish_reason for row in rows}
    assert len({tuple(row.step_places) for row in rows}) > 1
    write_rows(tmp_path / "rows.parquet", rows, about(tiny_pair, candidates))
    assert read_sweep(tmp_path).rows == rows


def test_how_many_steps_are_shown(tiny_pair: Pair) -> None:
    """Steps with a whole block: all if asked for, the same for a seed; none if 0 are asked for or not dense."""
    dense = partial(replay, tiny_pair, prompts(2), [2, 6], max_new_tokens=20, method="dense")
    for row in dense(step_samples=1000).rows:
        assert row.step_places == list(range(19 - 6 + 1))
    five = dense(step_samples=5).rows
    assert five == dense(step_samples=5).rows
    assert [row.step_places for row in five] != [row.step_places for row in dense(step_samples=5, seed=1).rows]
    for row in [*dense(step_samples=0).rows, *dense(method="replay").rows, *dense(method="decode").rows]:
        assert (row.step_places, row.step_contexts, row.step_embeddings) == ([], b"", b"")
    (short, _) = dense(max_new_tokens=6).rows
    assert (len(short.accepted[0]), short.step_places) == (5, [])  # too short for one whole block


def test_answers_that_stop_show_their_last_steps_too(tiny_pair: Pair) -> None:
    """All positions before the stop token have a step: it ends the text with any block size."""
    settings = {"max_new_tokens": 30, "temperature": 0.7, "method": "dense"}
    (row,) = replay(tiny_pair, prompts(1), [2, 6], **settings).rows
    tokens = row.output_tokens
    stop = next(token for i, token in enumerate(tokens) if i >= 9 and token not in tokens[:i])
    (row,) = replay(stopping_at(tiny_pair, stop), prompts(1), [2, 6], **settings).rows
    assert (row.finish_reason, row.output_tokens[-1]) == ("stop", stop)
    assert row.step_places == list(range(len(row.output_tokens) - 1))


def test_fewest_steps_takes_the_best_way() -> None:
    # The second candidate gets further at anchor 0; the first one reaches anchor 1, where it has 3 accepted.
    first, second = [0, 3, 0, 0, 0], [1, 0, 0, 0, 0]
    assert [len(emitted_along(accepted)) for accepted in (first, second)] == [2, 4]
    assert fewest_steps([first, second]) == 2
    assert fewest_steps([[0, 0, 1, 0, 0, 0], [1, 0, 2, 0, 0, 0]]) == 3  # 2 + 3 + 1
    assert fewest_steps([[]]) == 0


def test_the_prefill_is_recorded(tiny_pair: Pair) -> None:
    (prompt,) = prompts(1)
    (row,) = decode(tiny_pair, [prompt], [1, 3], max_new_tokens=4).rows
    (first, *_) = generate(tiny_pair, prompt.encode(tiny_pair.tokenizer), block_size=3, max_new_tokens=1)
    assert first.prefill is not None
    assert first.prefill.context is not None
    probs = torch.zeros(tiny_pair.vocab_size)
    probs[row.probs_ids] = torch.tensor(row.probs)
    torch.testing.assert_close(probs, first.prefill.probs, atol=MIN_PROB, rtol=1e-4)
    assert row.tail_mass == pytest.approx(1 - sum(row.probs), abs=1e-5)
    torch.testing.assert_close(torch.tensor(row.context), first.prefill.context, atol=1e-5, rtol=1e-4)
    assert row.num_prompt_tokens == len(prompt.encode(tiny_pair.tokenizer))


def test_rejects_leave_the_other_prompts_alone(parrot: Pair) -> None:
    """A prompt that is too long, one that the template refuses, and a chat turn together with the later ones."""
    tokenizer = copy.deepcopy(parrot.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}"
        "{% endfor %}"
    )
    pair = dataclasses.replace(parrot, tokenizer=tokenizer)
    first, second = prompts(2)
    long = Prompt("demo", (Message("user", "x" * parrot.max_length),))
    refused = Prompt("demo", (Message("system", "be brief"), Message("user", "hello")))
    talk = Prompt("demo", second.messages, (long.text, "Why?"))
    settings = {"max_new_tokens": 10, "temperature": 1.0}
    for method in (decode, replay):
        outcome = method(pair, [first, long, refused, talk], [2, 3], **settings)
        too_long, no_system, turn, later = outcome.rejects
        assert (too_long.prompt_set, too_long.prompt) == ("demo", long.text)
        assert too_long.error.startswith("prompt of 1")
        assert no_system.error == "chat template: no system role"
        assert (turn.prompt_id, later.prompt_id) == prompt_ids(talk, 0, 1.0)[1:]
        assert later.error == f"an earlier turn: {turn.error}"
        alone = method(pair, [first, second], [2, 3], **settings)
        assert [(r.prompt_id, r.taus) for r in outcome.rows] == [(r.prompt_id, r.taus) for r in alone.rows]


def test_an_answer_that_ends_with_its_prefill_has_no_tau(parrot: Pair) -> None:
    (row,) = decode(parrot, prompts(1), [2], max_new_tokens=5).rows
    outcome = decode(stopping_at(parrot, row.output_tokens[0]), prompts(2), [2], max_new_tokens=5)
    assert outcome.rows == []
    assert [reject.error for reject in outcome.rejects] == ["no verify step: the answer ended with its prefill"] * 2


@pytest.mark.parametrize("method", [decode, replay])
def test_follow_ups_are_asked_after_the_targets_answers(parrot: Pair, method: Callable[..., Outcome]) -> None:
    (single,) = prompts(1)
    conversation = Prompt("demo", single.messages, ("And then?", "Why?"))
    settings = {"max_new_tokens": 12, "temperature": 0.7}
    outcome = method(parrot, [conversation, single], [2, 4], **settings)
    ids = prompt_ids(conversation, 0, 0.7)
    assert [row.prompt_id for row in outcome.rows] == [*ids, ids[0]]
    asked = conversation
    for turn in range(3):
        expected = method(parrot, [Prompt(asked.set, asked.messages)], [2, 4], **settings).rows[0]
        if turn == 0:  # later turns have other ids, and so other seeds
            assert outcome.rows[0].output_tokens == expected.output_tokens
        assert outcome.rows[turn].prompt == asked.text
        assert outcome.rows[turn].num_prompt_tokens == expected.num_prompt_tokens
        if asked.follow_ups:
            answer = parrot.tokenizer.decode(outcome.rows[turn].output_tokens, skip_special_tokens=True)
            asked = asked.followed_up(answer)


def test_noise_differs_between_prompts_and_seeds(parrot: Pair) -> None:
    by_seed = partial(decode, parrot, prompts(2), [3], max_new_tokens=30, temperature=1.5)
    rows = by_seed(seed=1).rows
    assert rows == by_seed(seed=1).rows
    assert rows[0].seed != rows[1].seed
    assert rows[0].seed == sampler_seed(1, rows[0].prompt_id)
    assert all(a.output_tokens != b.output_tokens for a, b in zip(rows, by_seed(seed=2).rows, strict=True))


def test_without_a_drafting_candidate_there_is_no_context(parrot: Pair) -> None:
    for method in (decode, replay):
        (row,) = method(parrot, prompts(1), [1], max_new_tokens=5).rows
        assert (row.context, row.taus) == ([], [1.0])
        validate(row, about(parrot, [1]))


def test_texts_that_differ_are_told(parrot: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rounding(Engine):
        """Engine in which block sizes from 3 get other tokens, as they may in bfloat16."""

        def step(self) -> list[Step]:
            steps = super().step()
            return [dataclasses.replace(s, tokens=(0,) * len(s.tokens)) if s.block_size > 2 else s for s in steps]

    truth = decode(parrot, prompts(1), [1, 2], max_new_tokens=9).rows[0]
    monkeypatch.setattr("blockpilot.sweep.sweep.Engine", Rounding)
    assert decode(parrot, prompts(1), [1, 2], max_new_tokens=9).rows[0].texts_agree
    (row,) = decode(parrot, prompts(1), [1, 2, 4], max_new_tokens=9).rows
    assert not row.texts_agree
    assert row.output_tokens == truth.output_tokens
    assert row.taus == [1.0, 2.0, 4.0]


def test_bad_settings_are_refused(parrot: Pair) -> None:
    target = copy.deepcopy(parrot.target)
    target.config.max_position_embeddings = 16
    sweep = partial(replay, dataclasses.replace(parrot, target=target), prompts(1), max_new_tokens=5)
    for candidates, reason in (([], ""), ([3, 2], ""), ([4, 33], ".*at most 32"), ([2, 16], ".*context of 16")):
        with pytest.raises(ValueError, match=re.escape(f"candidates {tuple(candidates)}: ") + reason):
            sweep(candidates)
    with pytest.raises(ValueError, match="temperature -1"):
        sweep([2], temperature=-1)


def test_candidates_around_the_trained_block_size() -> None:
    assert candidates_around(16) == [14, 15, 16, 17, 18]
    assert candidates_around(8, k=1) == [7, 8, 9]
    assert candidates_around(2) == [1, 2, 3, 4]
    assert candidates_around(32) == [30, 31, 32]


def test_totals_are_divided_once(parrot: Pair) -> None:
    """With a draft that is always right: 24 tokens after the prefill's; the last block has the remaining 4."""
    (row,) = decode(parrot, prompts(1), [1, 5], max_new_tokens=25).rows
    assert row.output_tokens == [row.output_tokens[0]] * 25
    assert row.emitted_histograms == [[0, 24], [0, 0, 0, 0, 1, 4]]
    assert (row.num_steps, row.taus, row.finish_reason) == ([24, 5], [1.0, 4.8], "length")
    long = dataclasses.replace(
        row, taus=[1.0, 4.0], num_steps=[40, 10], emitted_histograms=[[0, 40], [0] * 4 + [10, 0]]
    )
    even = dataclasses.replace(
        row, taus=[1.0, 1.0], num_steps=[4, 4], emitted_histograms=[[0, 4], [0, 4, 0, 0, 0, 0]]
    )
    summary = Summary().add([row, long]).add([even])
    assert summary.tau_curve == {1: 1.0, 5: (24 + 40 + 4) / (5 + 10 + 4)}
    assert summary.best_counts == {1: 1, 5: 2}
    assert (summary.share_within(0, 5), summary.share_within(4, 5)) == (2 / 3, 1)
    nothing = Summary()
    assert (nothing.tau_curve, nothing.best_counts, nothing.ceiling) == ({}, {}, None)
    assert decode(parrot, [], [2], max_new_tokens=5) == ([], [])
