"""Client libraries against a running server, each unmodified, in an environment of its own.

For every client an environment is made with the versions below, and `client_worker.py` uses the server in it as the
client's users do. A row of the table is one use. The job fails where one of them does.

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
"""Packages by client, which is a function of the worker; the first package is the client's own."""


class ClientsConfig(Config):
    """Which clients, and the server."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server's root."""
    clients: tuple[str, ...] = tuple(CLIENTS)
    tokenizer: Path | None = None
    """Directory with the target's tokenizer, which lm-eval and aiperf read; by default the embedded target's."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a client may take."""
    output: Path = Path("runs/clients")
    """Environments, which are kept, the table, and what the clients print."""


class Use(NamedTuple):
    """One use of the server by a client; `problem` is empty where it went well."""

    client: str
    what: str
    problem: str


def environment(client: str, folder: Path) -> Path:
    """The Python of a client's environment, which is made where it is missing."""
    python, made = folder / "bin" / "python", folder / "packages.json"
    packages = list(CLIENTS[client])
    if not made.is_file() or json.loads(made.read_text()) != packages:
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        if subprocess.run(install).returncode:
            raise ValueError(f"{client}: cannot install {', '.join(packages)}")
        write_text(made, json.dumps(packages))
    return python


def uses(client: str, python: Path, settings: Mapping[str, str], log: Path, timeout_s: float) -> list[Use]:
    """What a client's worker reports; what the client prints goes to `log`."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as errors:
        done = subprocess.run(
            [python, WORKER, client, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=variables,
            timeout=timeout_s,
        )
    found = [Use(client, **json.loads(line)) for line in done.stdout.splitlines()]
    if done.returncode or not found:
        found.append(Use(client, "to its end", f"status {done.returncode}; what it said: {log}"))
    return found


def run(config: ClientsConfig) -> list[Use]:
    """Print and write a table of all uses. Raises ValueError where one fails, or there is no server."""
    if unknown := [client for client in config.clients if client not in CLIENTS]:
        raise ValueError(f"clients {unknown[0]!r}: must be one of {', '.join(CLIENTS)}")
    try:
        models = httpx.get(f"{config.url}/v1/models", timeout=30).json()["data"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ValueError(f"url {config.url}: no server answers ({error})") from None
    folder = config.output.absolute()
    tokenizer = config.tokenizer or find_target(EMBEDDED_TARGET).directory
    settings = {"url": config.url, "model": models[0]["id"], "tokenizer": str(tokenizer.absolute())}
    found, rows = list[Use](), list[dict[str, str]]()
    for client in config.clients:
        python = environment(client, folder / client)
        for use in uses(client, python, settings, folder / f"{client}.log", config.timeout_s):
            found.append(use)
            rows.append({"client": CLIENTS[client][0], "what": use.what, "result": use.problem or "ok"})
            print(" | ".join(rows[-1].values()), file=sys.stderr)
    print(markdown(rows))
    write_text(folder / "clients.md", markdown(rows) + "\n")
    if failed := [use for use in found if use.problem]:
        raise ValueError(f"{len(failed)} of {len(found)} uses failed; what the clients said: {folder}/*.log")
    return found


if __name__ == "__main__":
    main(ClientsConfig, run)
