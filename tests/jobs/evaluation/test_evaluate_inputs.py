"""Inputs of an evaluation: groups of prompts, sweeps, policies; bad input ends in one line before Ray starts."""

import dataclasses
from pathlib import Path

import pytest

from blockpilot.pairs.loading import Pair
from blockpilot.policy.dataset import prompt_key
from blockpilot.prompts.files import Message, Prompt, load_prompts
from blockpilot.sweep.rows import Metadata, SweepRow, prompt_ids, write_rows
from blockpilot.sweep.summary import Summary
from blockpilot.sweep.sweep import sweep_prompts
from helpers.command_line import error_of
from helpers.evaluations import (
    CANDIDATES,
    NUM_TOKENS,
    QUESTIONS,
    SWEPT,
    changed,
    prompt_file,
    retrained,
    write_policy,
)
from helpers.policies import register
from jobs import evaluate
from jobs.common.learned_from import LearnedFrom
from jobs.common.registry import CHAMPION, UNTRAINED, Registry
from jobs.evaluation.inputs import POLICY, EvaluateConfig, Swept, find_policies, group, read_inputs


@pytest.mark.parametrize("num", [1, 3])
def test_groups_never_mix_sets(num: int) -> None:
    sets = "aabacbbacbaab"
    groups = group([Prompt(name, (Message("user", str(i)),)) for i, name in enumerate(sets)], num)
    for name in "abc":
        set_groups = [indices for indices in groups if sets[indices[0]] == name]
        assert [index for indices in set_groups for index in indices] == [
            i for i, prompt_set in enumerate(sets) if prompt_set == name
        ]
        assert all(len(indices) == num for indices in set_groups[:-1])
    assert sum(map(len, groups)) == len(sets)


def test_groups_of_mixed_traffic_take_the_sets_in_turn() -> None:
    sets = "aaabbc"
    groups = group([Prompt(name, (Message("user", str(i)),)) for i, name in enumerate(sets)], 4, mixed=True)
    assert ["".join(sets[i] for i in indices) for indices in groups] == ["abca", "ba"]
    assert sorted(i for indices in groups for i in indices) == [*range(6)]


BASELINES = "control, random, means, verification, budget, untrained, lookup, switch, no-lookup, oracle"
OF_SWEEP = "--prompts demo --sweep sweep {pair}"


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompts nope", "unknown prompt set 'nope': choose one of demo, "),
        ("--prompts gone.jsonl", "prompt file not found: gone.jsonl"),
        ("--prompts demo --num-prompts 1", "1 prompts: intervals need at least two"),
        ("--prompts demo --pair nope", "unknown pair 'nope': named pairs are smollm2-135m, "),
        ("--prompts demo --target x --block-sizes 2 4", "'x' has no draft, block_sizes (2, 4) needs one: --draft"),
        ("--prompts demo --target x --tree-sizes 3", "target 'x' has no draft, tree_sizes (3,) needs one: --draft"),
        ("--prompts demo --sweep nowhere", "nowhere: no such file"),
        ("--prompts demo --sweep sweep", "sweep sweep: made for target {target} with draft"),
        (
            "--prompts {overlap} --sweep sweep {pair}",
            "1 of 3 prompts are in sweep sweep and so not held out; {first}",
        ),
        (f"{OF_SWEEP} --seed 0", "seed 0: must be another than the sweep's 0"),
        (f"{OF_SWEEP} --seed -1 --repeats 2", "seed -1: must be another than the sweep's 0"),
        (f"{OF_SWEEP} --block-sizes 6 8", "(6, 8): none is a candidate of the sweep [2, 3, 4]"),
        ("--prompts demo --block-sizes 1 2", "(1, 2): must be ascending and at least 2 (1 is AR"),
        ("--prompts demo --block-sizes 2 2", "(2, 2): must be ascending"),
        ("--prompts demo --block-sizes 33", "(33,): must be at most 32"),
        ("--prompts demo --baselines random luck", f"'luck': must be one of {BASELINES}"),
        ("--prompts demo --tree-sizes 2 2", "(2, 2): must be ascending and 1 to 31"),
        ("--prompts demo --tree-sizes 0 2", "(0, 2): must be ascending and 1 to 31"),
        ("--prompts demo --tree-sizes 4 32", "(4, 32): must be ascending and 1 to 31"),
        ("--prompts demo --max-new-tokens 1", "max_new_tokens: Input should be greater than or equal to 4"),
        ("--prompts demo --temperature nan", "temperature: Input should be a finite number"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str,
    message: str,
    tmp_path: Path,
    tiny_pair_dirs: tuple[Path, Path],
    swept_rows: list[SweepRow],
    metadata: Metadata,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One-line error for bad input, before Ray starts and before a store is opened."""
    monkeypatch.setattr("jobs.evaluate.Registry.open", lambda: pytest.fail("opened a store"))
    target, draft = tiny_pair_dirs
    write_rows(tmp_path / "sweep" / "part.parquet", swept_rows, metadata)
    overlap = prompt_file(tmp_path / "overlap.jsonl", [*QUESTIONS[:2], SWEPT[1]])
    row = next(row for row in swept_rows if row.prompt == SWEPT[1])
    command_line = arguments.format(overlap=overlap, pair=f"--target {target} --draft {draft}")
    expected = message.format(target=target, first=f"the first: {row.prompt_id} {row.prompt!r}")
    assert expected in error_of(EvaluateConfig, evaluate.run, command_line)


def test_sweeps_are_of_one_pair(
    config: EvaluateConfig, tmp_path: Path, swept_rows: list[SweepRow], metadata: Metadata
) -> None:
    """Sweeps of pairs with the same names but different revisions are refused."""
    other_metadata = dataclasses.replace(metadata, pair=metadata.pair._replace(draft_revision="another"))
    for name, sweep_metadata in (("one", metadata), ("two", other_metadata)):
        write_rows(tmp_path / name / "part.parquet", swept_rows, sweep_metadata)
    with pytest.raises(ValueError, match=r"of one pair wanted, these are of .*another"):
        read_inputs(changed(config, sweep=(str(tmp_path / "one"), str(tmp_path / "two"))))


def test_taus_of_sweeps_are_those_of_the_same_temperature(
    config: EvaluateConfig, tiny_pair: Pair, swept_rows: list[SweepRow], metadata: Metadata, tmp_path: Path
) -> None:
    texts = load_prompts(str(prompt_file(tmp_path / "hot.jsonl", [f"hot {i}?" for i in range(4)])))
    settings = {"max_new_tokens": NUM_TOKENS, "temperature": 5.0}
    hot = sweep_prompts(tiny_pair, texts, CANDIDATES, method="decode", **settings).rows  # type: ignore[arg-type]
    assert Summary().add(hot).tau_curve[4] > Summary().add(swept_rows).tau_curve[4]
    write_rows(tmp_path / "cold" / "part.parquet", swept_rows, metadata)
    write_rows(tmp_path / "hot" / "part.parquet", hot, metadata)
    config = changed(config, sweep=(str(tmp_path / "cold"), str(tmp_path / "hot")))
    for temperature, rows in ((0.0, swept_rows), (5.0, hot), (1.0, [*swept_rows, *hot])):
        swept = read_inputs(changed(config, temperature=temperature))[1]
        assert swept == Swept(tiny_pair.id, CANDIDATES, Summary().add(rows).tau_curve)


# Policies


@pytest.mark.usefixtures("no_ray")
def test_policies_that_do_not_fit_are_refused(
    config: EvaluateConfig, registry: Registry, tiny_pair: Pair, policy_dir: Path, tmp_path: Path
) -> None:
    """Policies refused: missing ones, those of other models, and those trained on one of the prompts."""

    def refusal(policy: object, *more: object) -> str:
        pair = f"--target {config.pair.target} --draft {config.pair.draft}"
        arguments = (pair, "--prompts", *config.prompts, "--policy", policy, *more)
        return error_of(EvaluateConfig, evaluate.run, " ".join(map(str, arguments)))

    for policy in ("champion", "newest"):
        assert "not found" in refusal(policy)
        assert refusal(policy).endswith("Give the directory of a policy, or --policy none\n")
    assert "nowhere/policy.json: no such file" in refusal("nowhere")
    assert "gone/policy.json: no such file" in refusal(policy_dir, "--rivals", "gone")
    other_pair = dataclasses.replace(tiny_pair, id=tiny_pair.id._replace(target="other"))
    assert "made for target other with draft" in refusal(write_policy(tmp_path / "other", other_pair))
    register(registry, policy_dir, tiny_pair.id)
    assert "@champion" in refusal("champion")
    expected = f"output {tmp_path / 'empty'}: no evaluation.json, nothing to log"
    assert expected in refusal("none", "--relog", "--output", tmp_path / "empty")

    rival = write_policy(tmp_path / "rival", tiny_pair)
    LearnedFrom(frozenset({prompt_key("something else")})).write(policy_dir)
    LearnedFrom(frozenset({prompt_key(QUESTIONS[3]), prompt_key(QUESTIONS[5])})).write(rival)
    prompt = next(p for p in load_prompts(*config.prompts) if p.text in (QUESTIONS[3], QUESTIONS[5]))
    message = f"2 of 8 prompts are among those that policy {rival} was trained on"
    for arguments in ((rival,), (policy_dir, "--rivals", rival)):
        assert f"{message}; the first: {prompt_ids(prompt, 0, 0.0)[0]} {prompt.text!r}" in refusal(*arguments)


def test_the_champion_is_measured_beside_every_other_policy(
    config: EvaluateConfig, registry: Registry, policy_dir: Path, tiny_pair: Pair
) -> None:
    def methods(policy: object, **changes: object) -> tuple[list[str], int | None, int | None]:
        policies, version, champion = find_policies(changed(config, policy=str(policy), **changes), registry)
        return list(policies), version and version.number, champion

    assert methods("none") == ([], None, None)
    assert methods(policy_dir) == ([POLICY], None, None)
    first, second = (register(registry, policy_dir, tiny_pair.id) for _ in range(2))
    assert methods("newest") == ([POLICY], 2, None)
    registry.set_champion(first)
    assert methods("newest") == ([POLICY, CHAMPION], 2, 1)
    assert methods(policy_dir) == ([POLICY, CHAMPION], None, 1)
    assert methods("champion") == ([POLICY], 1, None)
    assert methods("newest", rivals=()) == ([POLICY], 2, None)
    rival = write_policy(policy_dir.parent / "rival", tiny_pair)
    assert methods("newest", rivals=(str(rival), CHAMPION)) == ([POLICY, "rival", CHAMPION], 2, 1)
    for name in ("AR", "B=3", "tree 3", UNTRAINED, POLICY):  # a directory with the name of another method
        namesake = write_policy(policy_dir.parent / "rivals" / name, tiny_pair)
        assert methods("newest", rivals=(str(namesake),)) == ([POLICY, str(namesake)], 2, None)
    registry.set_champion(second)
    assert methods("newest") == ([POLICY], 2, None)
    retrained_version = register(
        registry, write_policy(policy_dir.parent / "old", retrained(tiny_pair)), tiny_pair.id
    )
    registry.set_champion(retrained_version)  # left out when the pair is loaded
    assert methods(policy_dir) == ([POLICY, CHAMPION], None, 3)
