"""A prompt on its way to the cache, and tau on its way to the kernel, pass few files.

A walk is a list of functions, each of which calls the next by name; a step that no longer does so
fails, so a walk that grows must be written down anew.
"""

from __future__ import annotations

import ast

import pytest

from support.source_tree import ROOT

PROMPT = (
    ("umim_core/model/umim.py", "UMIM.generate", "_steps"),
    ("umim_core/model/umim.py", "UMIM._steps", "encode_prompts"),
    ("umim_core/model/inputs.py", "encode_prompts", "encode"),
    ("umim_core/backbone/backbone.py", "Backbone.encode", "encode"),
    ("umim_core/text/token_ids.py", "encode", None),
    ("umim_core/model/umim.py", "UMIM._steps", "steps"),
    ("umim_core/inference/engine.py", "Engine.steps", "read_prompts"),
    ("umim_core/inference/prompts.py", "read_prompts", "_cut"),
    ("umim_core/inference/prompts.py", "_cut", "segment_prompt"),
    ("umim_core/merging/merged_model.py", "MergedModel.segment_prompt", "segment_prefix"),
    ("umim_core/rules/matcher.py", "segment_prefix", None),
    ("umim_core/rules/matcher.py", "Matcher.segment_many", "_cut"),
    ("umim_core/rules/matcher.py", "Matcher._cut", "segment"),
    ("umim_core/rules/trie.py", "segment", None),
    ("umim_core/inference/prompts.py", "read_prompts", "pack_rows"),
    ("umim_core/merging/packing.py", "pack_rows", None),
    ("umim_core/inference/engine.py", "Engine.steps", "prefill"),
    ("umim_core/inference/engine.py", "Engine.prefill", "of_prompts"),
    ("umim_core/inference/unit_cache.py", "UnitInputs.of_prompts", "_unit_embeddings"),
    ("umim_core/inference/unit_cache.py", "UnitInputs._unit_embeddings", "merge"),
    ("umim_core/merging/span_cache.py", "SpanCache.merge", None),
    ("umim_core/inference/engine.py", "Engine.prefill", "run_layers"),
    ("umim_core/inference/unit_cache.py", "run_layers", None),
    ("umim_core/backbone/row_cache.py", "RowLayer.update", None),
)
TAU = (
    ("umim_core/config/rule_fields.py", "RulesConfig", None),
    ("flows/parts.py", "_rules", "stage"),
    ("tasks/stages/mine.py", "count_stage", "_options"),
    ("tasks/stages/mine.py", "_options", "MiningOptions"),
    ("umim_core/mining/mining_options.py", "MiningOptions", None),
    ("tasks/stages/mine.py", "count_stage", "find_ngrams"),
    ("umim_core/mining/finding.py", "find_ngrams", "count"),
    ("tasks/data/counting.py", "ClusterCounter.count", "_count_order"),
    ("tasks/data/counting.py", "_count_order", "items"),
    ("umim_core/mining/hashing.py", "PartitionedCounts.items", None),
)
Walk = tuple[tuple[str, str, str | None], ...]


def find(tree: ast.AST, name: str) -> ast.AST:
    """The function or class of a dotted name."""
    for part in name.split("."):
        tree = next(node for node in ast.walk(tree) if getattr(node, "name", None) == part)
    return tree


def called(tree: ast.AST) -> set[str]:
    """Names of everything that is called, or handed on to be called, in a piece of code."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize(("walk", "most"), [(PROMPT, 14), (TAU, 7)], ids=["prompt", "tau"])
def test_a_walk_passes_few_files_and_each_step_calls_the_next(walk: Walk, most: int) -> None:
    files = {file for file, _, _ in walk}
    assert len(files) <= most
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in files}
    for (file, name, callee), (_, following, _) in zip(walk, (*walk[1:], walk[-1]), strict=True):
        body = find(trees[file], name)
        if callee is not None:
            assert callee in called(body), f"{file}: {name} does not call {callee}"
            assert callee in ("stage", following.rpartition(".")[2]), (callee, following)


def test_a_step_that_calls_nothing_of_the_name_is_seen() -> None:
    assert "g" in called(ast.parse("def f(): return h(g)"))
    assert "g" not in called(ast.parse("def f(): return h()"))
    with pytest.raises(StopIteration):
        find(ast.parse("def f(): pass"), "g")
