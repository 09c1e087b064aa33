"""Damaged files of every kind are refused with a ValueError that names the file, or read with what is intact."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockpilot.control.cost import read_price
from blockpilot.draft_training.answers import Answer, AnswerSource, answer_source, read_answers, write_answers
from blockpilot.draft_training.features import FeatureSource, TargetFeatures, feature_source, write_features
from blockpilot.drafts.dflash_checkpoint import save_draft, write_vocabulary
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.drafts.families import load_any_draft
from blockpilot.pairs.loading import Pair
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.prompts.files import load_prompts
from blockpilot.sweep.rows import read_file, write_rows
from helpers.eagle3 import random_eagle3
from helpers.policies import step_policy, tiny_policy
from helpers.prices import price
from helpers.sweeps import metadata, synthetic_rows
from helpers.tiny import tiny_draft, tiny_target
from jobs.common.learned_from import LearnedFrom

READERS: dict[str, Callable[[Path], object]] = {
    "prompt-policy": load_policy,
    "step-policy": load_policy,
    "draft": load_any_draft,
    "eagle3": load_any_draft,
    "sweep/part.parquet": read_file,
    "price.json": lambda path: read_price(str(path)),
    "features.safetensors": feature_source,
    "answers.parquet": lambda path: (answer_source(path), read_answers(path)),
    "prompts.jsonl": lambda path: load_prompts(str(path)),
    "learned": LearnedFrom.read,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Pair) -> Path:
    """A folder with every kind of file."""
    root = tmp_path_factory.mktemp("whole")
    for_pair = tiny_pair.id, tiny_pair.vocab_size
    save_policy(tiny_policy(*for_pair, (1, 2, 4), price=price(pair=tiny_pair.id)), root / "prompt-policy")
    save_policy(step_policy(*for_pair, price=price(pair=tiny_pair.id)), root / "step-policy")
    draft = tiny_draft(tiny_target())
    save_draft(draft, root / "draft")
    write_vocabulary(root / "draft", torch.arange(100))
    save_eagle3(random_eagle3(tiny_target().config, torch.arange(100)), root / "eagle3")
    write_rows(root / "sweep" / "part.parquet", synthetic_rows(8, 0), metadata())
    (root / "price.json").write_text(price(pair=tiny_pair.id).to_json())
    write_answers(root / "answers.parquet", [Answer("set", [1, 2, 3], 1, 0.0, 0)] * 5, AnswerSource("t", "r"))
    features = TargetFeatures(torch.zeros(4, 2).bfloat16(), torch.zeros(4, 2).bfloat16())
    write_features(root / "features.safetensors", features, FeatureSource("r", (1, 3)))
    lines = [json.dumps({"prompt": f"question {i}", "set": "s"}) for i in range(20)]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    LearnedFrom(frozenset({"a", "b"}), {0.0: {2: 1.5}}).write(root / "learned")
    return root


def damage(path: Path, dice: random.Random) -> None:
    """Cut a file short, change or insert bytes, or replace digits."""
    content = bytearray(path.read_bytes())
    position = dice.randrange(len(content))
    kind = dice.choice(("cut", "change", "insert", "number"))
    if kind == "cut":
        del content[position:]
    elif kind == "change":
        for _ in range(dice.randint(1, 8)):
            content[dice.randrange(len(content))] = dice.randrange(256)
    elif kind == "insert":
        content[position:position] = dice.randbytes(dice.randint(1, 9))
    else:
        digits = [i for i, byte in enumerate(content) if chr(byte).isdecimal()]
        for i in dice.sample(digits, min(2, len(digits))):
            content[i : i + 1] = dice.choice((b"-1", b"1e999", b"null", b"[]", b'"x"', b"99999999999999999999"))
    path.write_bytes(content)


@given(kind=st.sampled_from(sorted(READERS)), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_by_name_or_read(whole: Path, kind: str, seed: int) -> None:
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / kind
        path.parent.mkdir(exist_ok=True)
        if (whole / kind).is_dir():
            shutil.copytree(whole / kind, path)
            damage(dice.choice(sorted(path.iterdir())), dice)
        else:
            shutil.copy(whole / kind, path)
            damage(path, dice)
        message = None
        try:
            READERS[kind](path)
        except ValueError as error:  # anything else is a failure
            message = str(error)
        assert message is None or (folder in message and len(message.splitlines()) == 1)
