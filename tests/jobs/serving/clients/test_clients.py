"""Unmodified client libraries against a server: every case of `worker.py` succeeds.

`pytest -m soak tests/jobs/serving/clients` installs each library, in the version below, in an environment in pytest's
cache, and runs it against the embedded pair. The suite runs the installed `openai` against the tiny one.
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.loading import Pair
from blockpilot.pairs.table import EMBEDDED_TARGET
from helpers.api import app_of, over_http, replica_of
from helpers.patience import patient

WORKER = Path(__file__).with_name("worker.py")
CLIENTS: Mapping[str, Sequence[str]] = {
    "openai": ("openai==3.57.0",),
    "langchain": ("langchain-openai==1.7.4", "langchain==1.5.2"),
    "openai_agents": ("openai-agents==0.24.0",),
    "pydantic_ai": ("pydantic-ai-slim[openai]==2.68.0",),
    "litellm": ("litellm==1.110.2",),
    "llm": ("llm==0.36",),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers==5.24.0"),
    "aiperf": ("aiperf==0.13.0",),
}
"""Packages by client; each client is a function of the worker."""


@contextmanager
def served(pair: Pair) -> Iterator[str]:
    """Address of a server of the model `target`."""
    with replica_of(pair, num_slots=2, max_length=1000, max_queue=8) as replica, over_http(app_of(replica)) as url:
        yield url


def environment(client: str, folder: Path) -> Path:
    """Python executable of a client's environment, which is created if it is missing."""
    python, stamp = folder / "bin" / "python", folder / "packages.json"
    packages = list(CLIENTS[client])
    if not stamp.is_file() or json.loads(stamp.read_text()) != packages:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        stamp.write_text(json.dumps(packages))
    return python


def problems(client: str, python: Path, url: str) -> dict[str, str]:
    """Problem of every case of a client, empty if it succeeded; the client's output goes to standard error."""
    tokenizer = find_target(EMBEDDED_TARGET).directory
    settings = json.dumps({"url": url, "model": "target", "tokenizer": str(tokenizer)})
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command, options = [python, WORKER, client, settings], {"env": variables, "timeout": patient(600)}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options).stdout
    cases = map(json.loads, output.splitlines())
    return {case["what"]: case["problem"] for case in cases}


def test_the_installed_openai_library_succeeds_in_all_its_uses(tiny_pair: Pair) -> None:
    with served(tiny_pair) as url:
        by_case = problems("openai", Path(sys.executable), url)
    assert len(by_case) == 10
    assert not any(by_case.values()), by_case


@pytest.mark.soak
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_succeeds_in_all_its_uses(client: str, embedded_pair: Pair, pytestconfig: pytest.Config) -> None:
    python = environment(client, pytestconfig.cache.mkdir("clients") / client)
    with served(embedded_pair) as url:
        by_case = problems(client, python, url)
    assert by_case
    assert not any(by_case.values()), by_case
