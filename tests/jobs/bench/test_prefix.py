"""The benchmark of kept prefixes, on the tiny pair."""

import json
from pathlib import Path

import pytest

from jobs.bench.prefix import BenchPrefixConfig, run


def test_second_turns_and_unrelated_requests(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = map(str, tiny_pair_dirs)
    pair = {"target": target, "draft": draft, "dtype": "float32"}
    sizes = {"shared_tokens": 300, "chats": 2, "answer_tokens": 6, "num_slots": 2, "rounds": 2, "max_tokens": 6}
    found = run(BenchPrefixConfig(pair=pair, prompts="demo", output=tmp_path, **sizes))
    assert found == json.loads((tmp_path / "bench_prefix.json").read_text())
    for chat in found["chats"]:
        assert chat["prompt_tokens"] > chat["reused_tokens"] > 300
        assert chat["same_steps"]
        assert chat["without_tau"] == chat["kept_tau"] >= 1
    assert found["times_shorter"] > 0
    assert set(found["unrelated"]) == {"wall_s", "cpu_s"}
    assert all(0 < speed["low"] <= speed["value"] <= speed["high"] for speed in found["unrelated"].values())
    assert "times shorter" in capsys.readouterr().out
