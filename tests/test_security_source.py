"""Source checks: nothing can run code that came as data (reliability 41)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools", "packaging")

PICKLING_MODULES = {
    "_pickle",
    "cloudpickle",
    "cPickle",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "pickle5",
    "shelve",
}
FORBIDDEN_CALLS = {
    "builtins.eval": "eval runs text",
    "builtins.exec": "exec runs text",
    "eval": "eval runs text",
    "exec": "exec runs text",
    "os.popen": "a shell runs text",
    "os.system": "a shell runs text",
    "pandas.read_pickle": "pickle runs code when read",
    "subprocess.getoutput": "a shell runs text",
    "subprocess.getstatusoutput": "a shell runs text",
    "torch.load": "torch.load reads pickle",
    "torch.save": "torch.save writes pickle",
    "yaml.full_load": "use yaml.safe_load",
    "yaml.load_all": "use yaml.safe_load_all",
    "yaml.unsafe_load": "use yaml.safe_load",
}
FORBIDDEN_METHODS = {"read_pickle": "pickle runs code when read", "to_pickle": "pickle on disk"}
MUST_BE_FALSE = {"allow_pickle", "shell", "trust_remote_code"}
AUTO_LOADERS = {"from_config", "from_pretrained"}
SAFE_LOADERS = {"CSafeLoader", "SafeLoader"}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, for every import anywhere in a module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """``np.load`` -> ``numpy.load``; an empty string for what is not a dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def docstrings(tree: ast.Module) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }


def call_violations(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    name = dotted(node.func, names)
    if name in FORBIDDEN_CALLS:
        yield f"{name}: {FORBIDDEN_CALLS[name]}"
    if isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_METHODS:
        yield f"{node.func.attr}: {FORBIDDEN_METHODS[node.func.attr]}"
    for keyword in node.keywords:
        if keyword.arg in MUST_BE_FALSE and not is_false(keyword.value):
            yield f"{keyword.arg} must be the literal False"
    owner, _, method = name.rpartition(".")
    if method in AUTO_LOADERS and owner.rpartition(".")[2].startswith("Auto"):
        given = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
        if not given:  # the default asks the user, who might agree
            yield f"{name} needs the literal trust_remote_code=False"
    if name == "yaml.load":
        loaders = [k.value for k in node.keywords if k.arg == "Loader"] + node.args[1:2]
        if not loaders or dotted(loaders[0], names).rpartition(".")[2] not in SAFE_LOADERS:
            yield "yaml.load needs SafeLoader"
    if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        hidden = f"{dotted(node.args[0], names)}.{node.args[1].value}"
        if hidden in FORBIDDEN_CALLS:
            yield f"getattr hides {hidden}"


def violations(source: str) -> list[str]:
    """Every forbidden construct of one module, as ``line: reason``."""
    tree = ast.parse(source)
    names = imported_names(tree)
    texts = docstrings(tree)
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in FORBIDDEN_CALLS:
                    found.append((node.lineno, f"imports {full}: {FORBIDDEN_CALLS[full]}"))
        else:
            modules = []
        for module in modules:
            if set(module.split(".")) & PICKLING_MODULES:
                found.append((node.lineno, f"imports {module}, which runs code when read"))
        if isinstance(node, ast.Call):
            found += [(node.lineno, reason) for reason in call_violations(node, names)]
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if (
                    isinstance(key, ast.Constant)
                    and key.value in MUST_BE_FALSE
                    and not is_false(value)
                ):
                    found.append((node.lineno, f"{key.value} must be the literal False"))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in texts
            and "trust_remote_code=true" in node.value.lower()
        ):
            found.append((node.lineno, "an argument string turns on trust_remote_code"))
    return [f"{line}: {reason}" for line, reason in sorted(found)]


def source_files() -> list[Path]:
    files: list[Path] = []
    for folder in FOLDERS:
        files += sorted((ROOT / folder).rglob("*.py"))
    return files


def test_no_source_file_runs_code_that_came_as_data() -> None:
    files = source_files()
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
        "import pickle",
        "import torch, pickle as p",
        "from dill import loads",
        "import ray.cloudpickle",
        "from ray import cloudpickle\ncloudpickle.loads(b'')\nimport ray.cloudpickle as c",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.save({}, 'x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "def f():\n    from torch import load as innocent",
        "import torch\ngetattr(torch, 'load')('x')",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "import os\nos.system('ls')",
        "from os import system",
        "from x import AutoModel\nAutoModel.from_pretrained('x', trust_remote_code=True)",
        "options = {'trust_remote_code': True}",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained('x')",
        "from transformers import AutoTokenizer as A\nA.from_pretrained('x', revision=None)",
        "import transformers\ntransformers.AutoModelForCausalLM.from_config(config)",
        "from transformers import AutoModel\nAutoModel.from_pretrained('x', **options)",
        "arguments = 'pretrained=x,trust_remote_code=True'",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy\nnumpy.load('x', allow_pickle=maybe)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(text)",
        "frame.to_pickle('x')",
    ],
)
def test_each_forbidden_construct_is_found(bad: str) -> None:
    assert violations(bad)


@pytest.mark.parametrize(
    "good",
    [
        "model.eval()",
        "import torch\nstate = torch.tensor([1])",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import yaml\nyaml.safe_load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.CSafeLoader)",
        "from yaml import SafeLoader, load\nload(text, SafeLoader)",
        "AutoModel.from_pretrained('x', trust_remote_code=False)",
        "from transformers import AutoModel\nAutoModel.from_config(c, trust_remote_code=False)",
        "from umim_core import UMIM\nUMIM.from_pretrained('x')",
        "'''Never trust_remote_code=True.'''",
        "from safetensors.torch import load_file\nload_file('x')",
    ],
)
def test_safe_constructs_pass(good: str) -> None:
    assert violations(good) == []


def test_line_number_points_at_the_construct() -> None:
    assert violations("x = 1\n\nexec('x')") == ["3: exec: exec runs text"]
