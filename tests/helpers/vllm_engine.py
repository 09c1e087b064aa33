"""An engine of vLLM in a process of its own, for tests: `python -m helpers.vllm_engine '<arguments of VllmEngine>'`.

It reads batches as lines of JSON, a list of arguments of VllmRequest each, and answers each with a line of JSON: for
every request the fields of VllmAnswer, or why it was refused.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.patience import patient

ROOT = Path(__file__).parents[2]


class EngineProcess:
    """The tests' end of it."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log
        self._read()

    def decode(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any] | str]:
        assert self._process.stdin is not None
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        found: list[dict[str, Any] | str] = self._read()
        return found

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"vLLM has ended:\n{self._log.read_text()[-4000:]}"
        return json.loads(line)


@contextmanager
def vllm_process(folder: Path, **arguments: Any) -> Iterator[EngineProcess]:
    """Start an engine with arguments of VllmEngine; in fp32, and not compiled, which takes minutes on a CPU."""
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "max_logprobs": -1}
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "helpers.vllm_engine", json.dumps(options | arguments)]
    log = folder / "vllm.log"
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)
    with process:
        try:
            yield EngineProcess(process, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=patient(60))


def main() -> None:
    from jobs.vllm_plugin.engine import VllmEngine, VllmRequest
    from jobs.vllm_plugin.policies import PluginSettings

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    engine = VllmEngine(settings=PluginSettings(**arguments.pop("settings", {})), **arguments)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        found = engine.decode([VllmRequest(**request) for request in json.loads(line)])
        print(json.dumps([each if isinstance(each, str) else each._asdict() for each in found]), file=answers)


if __name__ == "__main__":
    main()
