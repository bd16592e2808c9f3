"""Recipes of flow ``umim-table``: one table of the paper, its tasks and texts scored on a cluster.

settings x tasks   cut into shards of questions, each a task of the cluster; answers are scored or
                   generated, as the task has it
texts              alignment and perplexity of base and checkpoint, each a task of the cluster
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.form import Merge
from umim_core.config.model_base import DIFFERENT, AtLeast0, AtLeast1, Model
from umim_core.config.recipe import BackboneDtype, RunRecipe
from umim_core.text.sources import DocumentSource


class TableSetting(Model):
    """A row of the table: what is merged, and by what."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """What the table calls it."""
    merge: Merge
    """What is merged: prompt and answer, the prompt alone, or nothing."""
    raw_tail: AtLeast0 = 0
    """Last tokens of contexts left raw."""
    method: str | None = None
    """A baseline in the merge module's place."""
    target_tr: Annotated[float | None, Field(gt=0.0, lt=1.0)] = None
    """Share of a context's tokens that a baseline drops; null: UMIM's saving."""
    protect: tuple[str, ...] = ()
    """Patterns of tokens that are never merged: digits, capitals, newlines, ..."""
    mine_tau: AtLeast1 | None = None
    """Least count of rules mined from a generated task; null: the checkpoint's."""

    @model_validator(mode="after")
    def _modes(self) -> Self:
        if self.raw_tail and self.merge != "prompt":
            raise ValueError("raw_tail is of contexts that are matched alone: set merge to prompt")
        if self.method is not None and self.merge != "prompt":
            raise ValueError("a baseline (method) merges prompts only: set merge to prompt")
        if self.target_tr is not None and self.method is None:
            raise ValueError("target_tr is the budget of a baseline: name one as method")
        if self.protect and self.merge == "none":
            raise ValueError("protect keeps tokens from being merged: leave it out, or merge")
        if self.protect and self.method is not None:
            raise ValueError("protect is of the checkpoint's own rules: leave out method")
        if self.mine_tau is not None and self.merge == "none":
            raise ValueError("mine_tau makes rules to merge by: leave it out, or merge")
        return self


class TableText(Model):
    """A held-out text: alignment and perplexity are measured on rows at even distances."""

    source: Annotated[DocumentSource, Field(discriminator="kind")]
    """Where it is read."""
    rows: AtLeast1 = 32
    """Rows at most."""
    segment_length: Annotated[int, Field(ge=2)] = 512
    """Tokens of a row."""
    methods: tuple[str, ...] = ()
    """Baselines that shorten first halves of rows; second halves are scored."""


class TableRecipe(RunRecipe):
    """One table of the paper on one checkpoint; its first setting is what others differ from."""

    kind: Literal["table"]
    table: Annotated[str, Field(pattern="^(tab|fig):")]
    """Label in the paper."""
    checkpoint: str
    """Embedded name, own name (umim path), or directory."""
    backbone: str | None = None
    """Directory or GGUF file of the checkpoint's backbone; null: the name in it."""
    settings: tuple[TableSetting, ...] = ()
    tasks: Annotated[tuple[str, ...], DIFFERENT] = ()
    """Tasks that come with the package, or tasks that lm-eval ships."""
    hub: str | None = None
    """Folder that stands for the hub in the tasks' data."""
    task_data: str | None = None
    """Folder with a .jsonl file per split of the one choice task."""
    questions: AtLeast1 | None = None
    """First questions; null: all."""
    new_tokens: AtLeast1 | None = None
    """Most tokens of an answer; null: the task's number."""
    answers: AtLeast1 | None = None
    """Most answers per question; null: the task's number."""
    confirm_run_unsafe_code: bool = False
    """Whether answers that are programs may be run, each confined."""
    shard: AtLeast1 = 50
    """Questions of one task of the cluster."""
    texts: dict[str, TableText] = Field(default_factory=dict)
    """Texts by name."""
    batch_size: AtLeast1 = 8
    """Questions or rows measured at a time."""
    dtype: BackboneDtype = "float32"
    """Data type of the backbone's weights."""
    cores: AtLeast1 = 1
    """CPU cores of one task of the cluster."""

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if bool(self.tasks) != bool(self.settings):
            raise ValueError("tasks and settings come together")
        if not self.tasks and not self.texts:
            raise ValueError("name tasks with settings, or texts")
        if len({setting.name for setting in self.settings}) != len(self.settings):
            raise ValueError("settings must all be different")
        if self.hub is not None and self.task_data is not None:
            raise ValueError("hub and task_data both say where questions lie: leave one out")
        if self.task_data is not None and len(self.tasks) > 1:
            raise ValueError("task_data is the data of one choice task: write a recipe per task")
        return self
