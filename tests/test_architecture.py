"""Architecture: layers, single places, sizes, light import, no machine paths, words."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.processes import output_of, run_command
from support.source_tree import ROOT, imports, parse, python_files, report

FOLDERS = ("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools", "tests")
MAX_LINES = 500
ORCHESTRATION = {"deepspeed", "mlflow", "prefect", "ray"}
HEAVY = ("torch", "transformers", "datasets", "numba", "pyarrow", "pandas", "tokenizers", "numpy")
# Preceded by nothing that makes it part of an address or of a relative path. Images of Ray have
# their home at /home/ray.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:home(?!/ray\b)|root|work|Users|mnt/data)/[\w.]")
RELATIVE = re.compile(r"(?:What|Which|Whether|Wherever|Where|Who|When|How)(?:ever)?\b")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def forbidden_imports(tree: ast.AST, forbidden: set[str]) -> list[str]:
    return [
        f"{line}: {name}" for line, name in imports(tree) if name.partition(".")[0] in forbidden
    ]


def ray_inits(tree: ast.AST) -> list[int]:
    """Lines that call or import ``ray.init`` under any alias."""
    aliases = {"ray"}
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "ray" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "ray":
            lines += [node.lineno for a in node.names if a.name == "init"]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "init"
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ):
            lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    ("layer", "above"),
    [
        (
            "umim_core",
            {"tasks", "flows", "infra", "benchmarks", "docs", "tools", "tests", *ORCHESTRATION},
        ),
        ("tasks", {"flows", "infra", "benchmarks", "docs", "tools", "tests"}),
        ("flows", {"infra", "benchmarks", "docs", "tools", "tests"}),
    ],
)
def test_imports_run_down_the_layers(layer: str, above: set[str]) -> None:
    found: list[str] = []
    for path in python_files(layer):
        found += report(path, forbidden_imports(parse(path), above))
    assert found == []


def test_lm_eval_is_known_to_the_harness_only() -> None:
    found: list[str] = []
    for path in python_files("umim_core"):
        inside = path.relative_to(ROOT / "umim_core").as_posix()
        if inside != "evaluation/harness.py" and not inside.startswith("evaluation/tasks/"):
            found += report(path, forbidden_imports(parse(path), {"lm_eval"}))
    assert found == []


def test_ray_is_initialised_in_one_place() -> None:
    found: list[str] = []
    for path in python_files("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools"):
        if path != ROOT / "tasks" / "cluster" / "ray_cluster.py":
            found += report(path, ray_inits(parse(path)))
    assert found == []


@pytest.mark.parametrize(
    "bad",
    ["import ray\nray.init()", "import ray as r\nr.init(x=1)", "from ray import init\ninit()"],
)
def test_ray_init_checker_sees_aliases(bad: str) -> None:
    assert ray_inits(ast.parse(bad))


def test_mlflow_is_imported_in_one_place() -> None:
    found: list[str] = []
    for path in python_files("umim_core", "tasks", "flows", "infra", "benchmarks", "docs", "tools"):
        if path != ROOT / "tasks" / "tracking" / "mlflow_store.py":
            found += report(path, forbidden_imports(parse(path), {"mlflow"}))
    assert found == []


def import_time_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules it needs when it is loaded; a package is needed by importing its parts.

    Args:
        sources: Module name -> source; the name of a package ends in ``.__init__``.

    Returns:
        Edges between those modules. Imports inside functions and below ``if`` do not count.
    """
    names = {name.removesuffix(".__init__") for name in sources}
    graph: dict[str, set[str]] = {}
    for full, source in sources.items():
        name = full.removesuffix(".__init__")
        package = name if full != name else name.rpartition(".")[0]
        top = ast.Module([n for n in ast.parse(source).body if not isinstance(n, ast.If)], [])
        for node in ast.walk(top):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [ast.Pass()]
        needed: set[str] = set()
        for _, target in imports(top, package):
            parts = target.split(".")
            needed |= {".".join(parts[:n]) for n in range(1, len(parts) + 1)} & names
        graph[name] = {n for n in needed if n != name and not f"{name}.".startswith(f"{n}.")}
    return graph


def sources_in(*folders: str) -> dict[str, str]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in python_files(*folders)
    }


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_of_umim_core_have_no_import_cycle() -> None:
    graph = import_time_graph(sources_in("umim_core"))
    assert graph["umim_core.merging.packing"]
    assert cycle(graph) == []


def test_flows_are_loaded_without_lm_eval() -> None:
    graph = import_time_graph(sources_in("umim_core", "tasks", "flows") | {"lm_eval": ""})
    assert "lm_eval" in graph["umim_core.evaluation.harness"]
    reached, left = set[str](), {"flows.parts"}
    while left:
        reached |= left
        left = {needed for name in left for needed in graph[name]} - reached
    assert "tasks.data.table_jobs" in reached
    assert "lm_eval" not in reached


def test_no_file_is_longer_than_the_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in python_files("packaging", *FOLDERS)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert long == {}


def test_importing_umim_core_is_light() -> None:
    probe = f"import sys, umim_core; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert output_of(sys.executable, "-c", probe).strip() == "[]"


def project_files() -> list[Path]:
    """Files that git tracks or would add."""
    options = ["-z", "--cached", "--others", "--exclude-standard"]
    listing = run_command("git", "ls-files", *options)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def machine_paths(text: str) -> list[str]:
    return [
        f"{number}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


def test_no_file_names_a_machine_path() -> None:
    found: list[str] = []
    for path in project_files():
        data = path.read_bytes()
        if b"\0" not in data[:8192] and len(data) < 2_000_000:
            found += report(path, machine_paths(data.decode("utf-8", errors="replace")))
    assert found == []


@pytest.mark.parametrize("folder", ["home/somebody", "root", "work", "Users/somebody"])
def test_machine_path_checker_sees_absolute_paths(folder: str) -> None:
    assert machine_paths(f"open('/{folder}/data.txt')")


def relative_clauses(tree: ast.Module, *, modules_only: bool) -> Iterator[str]:
    """First lines of a module's docstrings that begin with a relative clause."""
    documented: list[ast.Module | Definition] = [tree]
    if not modules_only:
        documented += [node for node in ast.walk(tree) if isinstance(node, Definition)]
    for node in documented:
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        # "Whether ..." is the usual first line of a property that is true or false.
        if RELATIVE.match(first) and (node is tree or not first.startswith("Whether")):
            yield first


def test_no_first_line_is_a_relative_clause() -> None:
    found: list[str] = []
    for path in python_files(*FOLDERS, "packaging"):
        in_tests = path.is_relative_to(ROOT / "tests")
        found += report(path, list(relative_clauses(parse(path), modules_only=in_tests)))
    assert found == []


def test_first_line_checker_sees_modules_classes_and_functions() -> None:
    source = (
        '"""{} it is."""\nclass A:\n    """What A holds."""\n    def f(self):\n        """How."""'
    )
    for word in ("What", "Whether", "Wherever"):
        tree = ast.parse(source.format(word))
        assert list(relative_clauses(tree, modules_only=False)) == [
            f"{word} it is.", "What A holds.", "How.",
        ]  # fmt: skip
        assert list(relative_clauses(tree, modules_only=True)) == [f"{word} it is."]
