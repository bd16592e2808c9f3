"""Recipes of flow ``umim-adapt`` that draw the curves of one task: settings, thresholds, seeds.

Source: paper, "Task Adaptation with SFT and RL", table task_adaptation_configurations.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from umim_core.config.evaluate import MergedPart, TaskSizes
from umim_core.config.model_base import DIFFERENT, AtLeast1, Model, Seed
from umim_core.config.recipe import (
    DEFAULT_TASK,
    AdaptConfig,
    BackboneDtype,
    DistillConfig,
    PreferenceConfig,
    RunRecipe,
)
from umim_core.config.rule_options import RuleFilters


class DocstringQuestions(Model):
    """Questions of the embedded task, made of the docstrings of the installed packages."""

    kind: Literal["docstrings"]


class QuestionFiles(Model):
    """Files of JSON lines ``{"id", "context", "choices", "gold"}``.

    Splits without a file are cut out of ``train`` by the hash of the questions' ids.
    """

    kind: Literal["files"]
    name: Annotated[str, Field(min_length=1, pattern=r"^[^'\"\n]+$")] = "questions"
    """What results call the task."""
    train: str
    """File of training questions."""
    valid: str | None = None
    """File of validation questions; null: from train."""
    test: str | None = None
    """File of test questions; null: from train."""
    prompt: str = "{context}"
    """Text before an answer, with {context} in it."""
    delimiter: str = " "
    """Text between prompt and answer."""


class HarnessQuestions(Model):
    """Questions of a multiple-choice task that lm-eval ships, with its prompt and its splits.

    Splits that its data set lacks are cut out of its training questions.
    """

    kind: Literal["lm-eval"]
    task: str
    """Name of the task in lm-eval."""
    hub: str | None = None
    """Folder that stands for the hub in the task's data."""


class AdaptationRecipe(RunRecipe):
    """Accuracy against token reduction for every setting of task adaptation, on one task."""

    kind: Literal["adaptation"]
    figure: Annotated[str | None, Field(pattern="^(tab|fig):")] = None
    """Label of the paper's figure that it is compared with, if there is one."""
    questions: Annotated[
        DocstringQuestions | QuestionFiles | HarnessQuestions, Field(discriminator="kind")
    ]
    """The task: embedded, of your files, or of lm-eval."""
    part: MergedPart = "context"
    """What SFT merges: the prompt, or the answer with it."""
    sizes: TaskSizes = TaskSizes()
    checkpoints: Annotated[tuple[str, ...], Field(min_length=1), DIFFERENT]
    """Embedded names, own names (umim path), or directories."""
    settings: Annotated[tuple[str, ...], Field(min_length=1), DIFFERENT] = (
        "WT + Rules",
        "WT + FT",
        "WT + DPO",
        "Task-trained",
        "Task-Adapted",
    )
    """Settings compared, of the table in umim_core/adaptation/settings.py."""
    controls: Annotated[tuple[str, ...], DIFFERENT] = ()
    """Trained controls, of umim_core/adaptation/control.py."""
    taus: Annotated[tuple[AtLeast1, ...], Field(min_length=1), DIFFERENT]
    """Least counts of a rule in the training questions."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1), DIFFERENT] = (0,)
    """Each trains every setting once."""
    overlap: Literal["greedy", "none"] = "none"
    """Overlap filter of the task's rules."""
    max_tokens: Annotated[int, Field(ge=8)] = 128
    """Most tokens of a question."""
    sft: DistillConfig
    dpo: PreferenceConfig
    control_dpo: dict[str, PreferenceConfig] = Field({})
    """Optimisation of controls, by their names; of others it is that of dpo."""
    batch_size: AtLeast1 = 16
    """Questions scored at a time."""
    dtype: BackboneDtype = "float32"
    """Data type of the backbone's weights while answers are scored."""

    @property
    def task_name(self) -> str:
        """Name of the task in results."""
        questions = self.questions
        if isinstance(questions, QuestionFiles):
            return questions.name
        return questions.task if isinstance(questions, HarnessQuestions) else DEFAULT_TASK

    def control_config(self, control: str) -> PreferenceConfig:
        """Return the optimisation of a control."""
        return self.control_dpo.get(control, self.dpo)

    def adapt_config(self, tau: int) -> AdaptConfig:
        """Return the adaptation under one threshold, as the stages of a pipeline take it."""
        return AdaptConfig(
            rules=RuleFilters(tau=tau, overlap=self.overlap, containment="keep"),
            **{name: getattr(self, name) for name in ("settings", "max_tokens", "sft", "dpo")},
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.seed:  # 0 stands in every recipe that was saved whole
            raise ValueError("every seed trains all settings: name them as seeds, not as seed")
        if self.part != "context" and isinstance(self.questions, DocstringQuestions):
            raise ValueError("the embedded task merges the context: leave out part")
        if unknown := set(self.control_dpo) - set(self.controls):
            raise ValueError(f"control_dpo must name controls of the recipe; got {sorted(unknown)}")
        self.check_batches(self.sft, self.dpo, *self.control_dpo.values())
        return self
