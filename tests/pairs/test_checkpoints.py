"""Checkpoint directories by name: downloads, and revisions of hub ids and local directories."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from blockpilot.pairs import checkpoints
from blockpilot.pairs.checkpoints import directory_revision, known_revision
from blockpilot.pairs.embedded import WHEELS
from blockpilot.pairs.loading import load_pair
from blockpilot.pairs.table import EMBEDDED_TARGET, REVISIONS, split_revision


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "tokenizer.json", "chat_template.jinja", "draft_vocabulary.json"]
)
def test_a_revision_is_of_every_byte_that_is_loaded(name: str, tmp_path: Path) -> None:
    for other in ("config.json", "model-00001-of-00003.safetensors", "notes.md", name):
        (tmp_path / other).write_bytes(bytes(5 * 2**20))
    before = directory_revision(tmp_path)
    (tmp_path / "notes.md").write_bytes(b"not loaded")
    assert directory_revision(tmp_path) == before
    with (tmp_path / name).open("r+b") as file:
        file.seek(5 * 2**19)  # neither at the start nor at the end
        file.write(b"x")
    assert directory_revision(tmp_path) != before
    before = directory_revision(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"a copy of the weights in Mistral's format")
    assert directory_revision(tmp_path) == before


def test_hub_ids_are_pinned_by_a_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    asked = []

    def download(repository: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append((repository, revision))
        files = ["config.json", "model-1.safetensors", "mask_embedding.pt", "additional_chat_templates/a.jinja"]
        others = ["x.py", "x.bin", "x.pt", "original/model-1.safetensors", "metal/model.bin", "original/config.json"]
        others += ["consolidated.safetensors", "consolidated.safetensors.index.json", "onnx/vocab.txt"]
        wanted = [*filter_repo_objects([*files, *others], **patterns)]  # as the hub's client does
        of_draft = len(asked) == 1
        assert wanted == (files[:3] if of_draft else [*files[:2], files[3]])
        commit = tmp_path / repository.replace("/", "-") / "0123abcd"
        shutil.copytree(tiny_pair_dirs[of_draft], commit)
        return str(commit)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    pair = load_pair(target="some/target@v1.0", draft="some/draft", dtype="float32")
    assert asked == [("some/draft", None), ("some/target", "v1.0")]
    assert pair.id == ("some/target", "0123abcd", "some/draft", "0123abcd")
    asked.clear()
    pair = load_pair("qwen3-8b-dflash2", dtype="float32")
    models = "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2"
    assert asked == [(models[1], None), (models[0], REVISIONS[models[0]])]
    assert pair.id == (models[0], "0123abcd", models[1], "0123abcd")


def test_revisions_are_known_without_a_download(
    tiny_pair_dirs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_pair_dirs[0]
    assert known_revision("target", str(directory)) == directory_revision(directory)
    assert known_revision("target", EMBEDDED_TARGET) == WHEELS[EMBEDDED_TARGET].sha256[:16]
    assert known_revision("target", "some/target") is None
    assert known_revision("draft", "some/draft@v2") == "v2"
    assert split_revision("/models/a@b") == ("/models/a@b", None)  # a path has no revision
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model@2").mkdir()
    assert split_revision("model@2") == ("model@2", None)
