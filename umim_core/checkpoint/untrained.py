"""Untrained checkpoints: rules with a module that still gives the anchor of its residual."""

from __future__ import annotations

import torch

from umim_core.backbone.backbone import Backbone
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.config.form import ModuleForm
from umim_core.errors import ConfigError, RuleSetError, require
from umim_core.merging.adapters import SpanAdapters, linear_maps
from umim_core.merging.merged_model import MergedModel
from umim_core.merging.module import MergeModule
from umim_core.merging.rule_rows import RuleRows
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet


def fresh_module(backbone: Backbone, rules: RuleSet, form: ModuleForm, seed: int) -> MergeModule:
    """Return a module of a form with the weights that training starts from, on its device."""
    check_depth(form.merge_depth, backbone.num_layers)
    fits, rule = not form.rule_rows or len(rules) > 0, "rule rows need at least one rule"
    require(fits, RuleSetError, rule, 0, "Lower tau, or leave rule_rows out.")
    module = MergeModule(backbone.hidden_size, form, longest=rules.longest)
    module.initialise(backbone.embedding_std, torch.Generator().manual_seed(seed))
    if form.rule_rows:
        module.rows = RuleRows.of_frequent(rules, form.rule_rows, backbone.hidden_size)
    if form.adapter_rank:
        layers = backbone.num_layers - form.merge_depth
        module.adapters = SpanAdapters(linear_maps(backbone), layers, form.adapter_rank)
        module.adapters.initialise(torch.Generator().manual_seed(seed))
    return module.to(backbone.device)


def check_depth(depth: int, layers: int) -> None:
    rule = f"merge_depth must be below {layers}, the layers of the model"
    require(depth < layers, ConfigError, rule, depth, "Choose a smaller one.")


def untrained_checkpoint(backbone: Backbone, rules: RuleSet, form: ModuleForm) -> Checkpoint:
    """Return a checkpoint that needs no training: a span has the anchor of the form's residual."""
    rule, remedy = "an untrained module must have a residual", "Choose last or exponential."
    require(form.residual != "none", ConfigError, rule, form.residual, remedy)
    rules.check_for_module(
        backbone.tokenizer_fingerprint, backbone.vocab_size, backbone.special_ids
    )
    module = fresh_module(backbone, rules, form, seed=0)
    merged_model = MergedModel(backbone, module, Matcher(rules))
    return Checkpoint.of(merged_model, {"steps": 0, "seed": 0})
