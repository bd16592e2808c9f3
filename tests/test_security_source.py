"""Source checks: nothing can run code that came as data (reliability 41).

Ruff's rules S refuse eval, exec, shells, unsafe YAML and calls of pickle; here is what it passes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from support.processes import ROOT

FOLDERS = ("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools", "packaging")
PICKLING = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
MUST_BE_FALSE = {"allow_pickle", "shell", "trust_remote_code"}
AUTO_LOADERS = {"from_config", "from_pretrained"}


def of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    own = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = f"{own}.{alias.name}".strip(".")
        if PICKLING & set(name.split(".")):
            yield f"imports {name}, which runs code when read"
        if name in ("torch.load", "torch.save"):
            yield f"{name} is pickle"


def of_call(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    tensors_alone = name == "torch.load" and given.get("weights_only") == "True"
    if (name in ("torch.load", "torch.save") and not tensors_alone) or name.endswith("to_pickle"):
        yield f"{name} is pickle"
    for option in MUST_BE_FALSE & set(given):
        if given[option] != "False":
            yield f"{option} must be the literal False"
    owner, _, method = name.rpartition(".")
    auto = owner.rpartition(".")[2].startswith("Auto")
    if auto and method in AUTO_LOADERS and "trust_remote_code" not in given:
        yield f"{name} needs the literal trust_remote_code=False"  # the default asks the user


def violations(source: str) -> list[str]:
    """Every forbidden construct of one module, as ``line: reason``."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(node.lineno, reason) for reason in of_import(node)]
        elif isinstance(node, ast.Call):
            found += [(node.lineno, reason) for reason in of_call(node)]
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                name = key.value if isinstance(key, ast.Constant) else None
                if name in MUST_BE_FALSE and ast.unparse(value) != "False":
                    found.append((node.lineno, f"{name} must be the literal False"))
        elif isinstance(node, ast.Constant) and "trust_remote_code=true" in str(node.value).lower():
            found.append((node.lineno, "a text turns on trust_remote_code"))
    return [f"{line}: {reason}" for line, reason in sorted(found)]


def test_no_source_file_runs_code_that_came_as_data() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.parent.name for path in files} >= {"packaging", "umim_core"}
    found = [
        f"{path.relative_to(ROOT)}:{item}"
        for path in files
        for item in violations(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "bad",
    [
        "import torch, pickle as p",
        "from ray import cloudpickle",
        "import torch\ntorch.save({}, 'x')",
        "def f():\n    from torch import load as innocent",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "import transformers\ntransformers.AutoModelForCausalLM.from_config(config)",
        "arguments = 'pretrained=x,trust_remote_code=True'",
        "import numpy as np\nnp.load('x', allow_pickle=maybe)",
        "frame.to_pickle('x')",
    ],
)
def test_each_forbidden_construct_is_found(bad: str) -> None:
    assert violations(bad)
