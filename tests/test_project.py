"""The project's own files: cluster.yaml, pinned versions, the direction of imports and the shape of the source."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config

import blockpilot
from helpers.patience import patient

ROOT = Path(__file__).parents[1]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)((?: --hash=sha256:[0-9a-f]{64})+)")
# The builds of torch and vLLM depend on the machine; the project itself is installed from the working tree.
UNPINNED = {"torch", "vllm", "blockpilot"}


# cluster.yaml


@pytest.fixture
def cluster() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return config


def test_cluster_is_valid_by_rays_own_schema(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))


def test_cluster_commands_pin_ray_and_ask_for_a_token(cluster: dict[str, Any]) -> None:
    """Ray's defaults, which install a nightly Ray and open the dashboard to everyone, are all replaced."""
    prepared = prepare_config(cluster)
    setup = [command for key in ("setup", "head_setup", "worker_setup") for command in prepared[f"{key}_commands"]]
    ray_pins = [pin for command in setup for pin in re.findall(r"ray\[[\w,]+\]==([\d.]+)", command)]
    assert set(ray_pins) == {_lock()["ray"]}
    assert not any("3.0.0.dev" in command for command in setup)
    for role in ("head", "worker"):
        *_, start = prepared[f"{role}_start_ray_commands"]
        assert "RAY_AUTH_MODE=token" in start
        assert "0.0.0.0" not in start
    assert "--dashboard-host=127.0.0.1" in prepared["head_start_ray_commands"][-1]
    assert "~/.ray/auth_token" in prepared["file_mounts"]


def test_cluster_workers_are_what_accelerator_type_asks_for(cluster: dict[str, Any]) -> None:
    worker = cluster["available_node_types"]["h100"]
    assert worker["resources"]["accelerator_type:H100"] == worker["resources"]["GPU"] == 8
    assert cluster["available_node_types"][cluster["head_node_type"]]["resources"]["CPU"] == 0


# Pinned versions


def test_lock_holds_nothing_but_exact_public_versions_and_their_checksums() -> None:
    lines = _locked()
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert not UNPINNED & _lock().keys()


def test_lock_satisfies_pyproject() -> None:
    lock = _lock()
    wrong = [
        str(requirement)
        for requirement in _project_requirements()
        if requirement.name not in UNPINNED
        and not requirement.specifier.contains(lock.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_lock_pins_every_dependency_of_a_dependency() -> None:
    assert sorted(set(_closure()) - _lock().keys() - UNPINNED) == []


def test_makefile_and_cluster_install_the_torch_of_pyproject() -> None:
    (torch,) = (r for r in _project_requirements() if r.name == "torch")
    for name in ("Makefile", "cluster.yaml"):
        assert set(re.findall(r"torch(==[\d.]+)", (ROOT / name).read_text())) == {str(torch.specifier)}, name


def _locked() -> list[str]:
    """Requirements of the lock, one per line."""
    text = (ROOT / "requirements.lock").read_text()
    return re.sub(r" \\\n\s+", " ", text).splitlines()


def _lock() -> dict[str, str]:
    pins = (line.split()[0].split("==") for line in _locked())
    return {canonicalize_name(name): version for name, version in pins}


def _project_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project["dependencies"] + extras]


def _closure() -> Iterator[str]:
    """Canonical names of pyproject's requirements and of their dependencies on this machine, recursively."""
    waiting, seen = _project_requirements(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name in UNPINNED:
            continue
        seen.add(key)
        yield name
        for line in metadata.requires(name) or []:
            child = Requirement(line)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(child)


# Layers


BREACHES = {
    "blockpilot/first.py": ("import jobs.common.config", "Imports go down"),
    "blockpilot/second.py": ("import ray", "blockpilot is a library"),
    "jobs/breach.py": ("import mlflow", "Only jobs.common.registry knows MLflow"),
    "jobs/serving/breach.py": ("import vllm", "Only the sweep by vLLM and the worker of peers know vLLM"),
}


def test_import_contracts_notice_a_breach(tmp_path: Path) -> None:
    """Every breach is reported; `make check` checks that the contracts hold."""
    for source in _sources("blockpilot", "jobs", "workflows"):
        copy = tmp_path / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name, (line, _) in BREACHES.items():
        (tmp_path / name).write_text(line + "\n")
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(120))
    assert linted.returncode == 1
    for _, contract in BREACHES.values():
        assert re.search(rf"{contract}.* BROKEN", linted.stdout), linted.stdout


# Shape of the source


PUBLIC_NAMES = [
    *("NAMED_PAIRS", "CandidateSet", "Engine", "FixedPolicy", "Pair", "PairId", "Policy", "Prefill", "PromptPolicy"),
    *("Request", "Sampling", "Step", "StepPolicy", "StepPrice", "generate", "load_pair", "load_policy"),
    "save_policy",
]


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_public_names_are_frozen_and_documented() -> None:
    """Names that users import: adding or removing one must be deliberate."""
    assert blockpilot.__all__ == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        value = getattr(blockpilot, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert (value.__doc__ or "").strip(), name
            assert not (value.__doc__ or "").startswith(f"{name}("), f"{name}: a generated docstring"


def test_packages_say_in_one_line_what_they_hold() -> None:
    for package in (ROOT / "blockpilot").rglob("*/__init__.py"):
        tree = ast.parse(package.read_text())
        doc = ast.get_docstring(tree) or ""
        assert doc, package
        assert "\n" not in doc, package
        assert len(tree.body) == 1, f"{package}: more than a docstring"


def test_modules_have_at_most_400_lines() -> None:
    lengths = {str(p): len(p.read_text().splitlines()) for p in _sources("blockpilot", "jobs", "workflows")}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}


def test_imports_for_type_checking_only_are_slow_libraries() -> None:
    """Such imports would hide cycles among our own modules."""
    guarded = {
        ast.unparse(statement)
        for path in _sources("blockpilot")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and path.name != "__init__.py"
        for statement in node.body
    }
    assert all(re.match(r"from (torch|transformers) import", statement) for statement in guarded), guarded


def test_who_loads_no_pair_imports_no_torch() -> None:
    """Importing torch would delay the start of these processes by seconds."""
    imports = "import sys, jobs.serve, jobs.serving.gateway, jobs.common.registry"
    code = f"{imports}; print(sorted({{'torch', 'transformers', 'mlflow'}} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_a_step_is_written_in_the_types_that_architecture_lists() -> None:
    """Listed types are the classes that the engine names, at most 20."""
    classes = {
        node.name
        for path in _sources("blockpilot")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    engine = ast.parse((ROOT / "blockpilot" / "engine" / "engine.py").read_text())
    named = {node.id for node in ast.walk(engine) if isinstance(node, ast.Name)} | {"Engine"}
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## The types of a step")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(named & classes)
    assert len(listed) <= 20


def test_class_names_have_one_meaning() -> None:
    files: dict[str, list[str]] = {}
    for path in _sources("blockpilot", "jobs"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name.removeprefix("_"), []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_the_tests_of_servings_promises_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "serving.md").read_text()))
    files = (ROOT / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    assert len(named) > 15
    assert not named - there
