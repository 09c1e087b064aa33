"""Compatibility test of unmodified client libraries with a running server, each in a separate environment.

Every client gets an environment with the versions below, in which `client_worker.py` uses the server as the client's
users do. A row of the table is one test case. The job fails if any case fails.

    python jobs/serve.py --served-model-name chat &
    python jobs/bench/clients.py --url http://127.0.0.1:8000
"""

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from pydantic import Field

from blockpilot.evaluation.tables import markdown
from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.table import EMBEDDED_TARGET
from blockpilot.storage import write_text
from jobs.common.config import Config, main

WORKER = Path(__file__).with_name("client_worker.py")
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
"""Packages by client, which is a function of the worker; the first package is the client."""


class ClientsConfig(Config):
    """Server and clients to test."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server's root."""
    clients: tuple[str, ...] = tuple(CLIENTS)
    """Clients to test; by default all."""
    tokenizer: Path | None = None
    """Directory of the target's tokenizer, for lm-eval and aiperf; by default the embedded target's."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Maximum seconds for all cases of a client."""
    output: Path = Path("runs/clients")
    """Output directory: environments (reused), the table, and the logs of the clients."""


class Use(NamedTuple):
    """Result of a test case of a client; `problem` is empty if it passed."""

    client: str
    what: str
    problem: str


def environment(client: str, folder: Path) -> Path:
    """The Python of a client's environment, which is created if it is missing."""
    python, stamp = folder / "bin" / "python", folder / "packages.json"
    packages = list(CLIENTS[client])
    if not stamp.is_file() or json.loads(stamp.read_text()) != packages:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        if subprocess.run(install).returncode:
            raise ValueError(f"{client}: cannot install {', '.join(packages)}")
        write_text(stamp, json.dumps(packages))
    return python


def uses(client: str, python: Path, settings: Mapping[str, str], log: Path, timeout_s: float) -> list[Use]:
    """Run a client's worker; returns its results. The output of the client goes to `log`."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as errors:
        process = subprocess.run(
            [python, WORKER, client, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
            timeout=timeout_s,
        )
    results = [Use(client, **json.loads(line)) for line in process.stdout.splitlines()]
    if process.returncode or not results:
        results.append(Use(client, "to its end", f"status {process.returncode}; what it said: {log}"))
    return results


def run(config: ClientsConfig) -> list[Use]:
    """Print and write a table of all cases. Raises ValueError if one fails, or without a server."""
    if unknown := [client for client in config.clients if client not in CLIENTS]:
        raise ValueError(f"clients {unknown[0]!r}: must be one of {', '.join(CLIENTS)}")
    try:
        models = httpx.get(f"{config.url}/v1/models", timeout=30).json()["data"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ValueError(f"url {config.url}: no server answers ({error})") from None
    folder = config.output.absolute()
    tokenizer = config.tokenizer or find_target(EMBEDDED_TARGET).directory
    settings = {"url": config.url, "model": models[0]["id"], "tokenizer": str(tokenizer.absolute())}
    results, rows = list[Use](), list[dict[str, str]]()
    for client in config.clients:
        python = environment(client, folder / client)
        for use in uses(client, python, settings, folder / f"{client}.log", config.timeout_s):
            results.append(use)
            rows.append({"client": CLIENTS[client][0], "what": use.what, "result": use.problem or "ok"})
            print(" | ".join(rows[-1].values()), file=sys.stderr)
    print(markdown(rows))
    write_text(folder / "clients.md", markdown(rows) + "\n")
    if failed := [use for use in results if use.problem]:
        raise ValueError(f"{len(failed)} of {len(results)} uses failed; logs of the clients: {folder}/*.log")
    return results


if __name__ == "__main__":
    main(ClientsConfig, run)
