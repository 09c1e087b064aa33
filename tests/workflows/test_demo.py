"""The demo end to end, by a user's command, on the tiny random pair."""

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from helpers.processes import Job
from helpers.trainings import ROOT, environment


@pytest.mark.ray
def test_the_demo_learns_serves_and_checks_its_answers(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = tiny_pair_dirs
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say the number {i}\n" for i in range(30)))
    arguments = f"""--target {target} --draft {draft} --prompts {prompts} --held-out 0.3 --num-training-prompts 8
        --num-prompts 4 --candidates 2 4 --max-new-tokens 8 --output {tmp_path / "demo"}"""
    command = [ROOT / "workflows" / "smollm2_135m.py", *arguments.split()]
    job = Job(command, cwd=tmp_path, env=environment(), output=tmp_path / "said")
    assert job.wait(600) == 0, job.log[-6000:]
    stages = re.findall("^--- (.*) ---$", job.log, re.MULTILINE)
    assert stages == ["ray", "sweep", "train", "evaluate", "promote", "serve", "ask", "check"]
    assert re.findall(r"^(\w+): \d+ s$", job.log, re.MULTILINE) == stages
    # The policy is a version of the target's registered model, in the demo's own store.
    [version] = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").search_model_versions("name='blockpilot-target'")
    assert str(version.version) == "1"
    assert "promote: blockpilot-target version 1 is" in job.log
    # Both answers came over HTTP and equal the target's.
    assert "(block_size: auto)" in job.log
    assert "(block_size: 4)" in job.log
    assert "Both served answers are bit for bit what the target writes one token at a time" in job.log
    # Ray Serve's controller ends by killing itself, which is not an error.
    assert "ServeController" not in job.log.split("--- ask ---")[1]
    for stage in ("sweep", "policy", "evaluate"):  # serve/ exists only if a policy became champion
        assert (tmp_path / "demo" / stage).is_dir(), stage
