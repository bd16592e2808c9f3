"""A tiny backbone with a tokenizer and a merge checkpoint for it, saved to disk once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.tiny_models import byte_level_bpe, random_model, tiny_config
from umim_core.backbone.backbone import load_backbone
from umim_core.checkpoint.checkpoint import Checkpoint

# lm-eval is the `eval` extra.
NEEDS_LM_EVAL = (
    "generation_contract", "harness", "harness_questions", "lm_eval_command", "model_args",
    "paired_results", "scoring", "tasks", "text_metrics",
)  # fmt: skip
collect_ignore = [] if find_spec("lm_eval") else [f"test_{name}.py" for name in NEEDS_LM_EVAL]

TEXT = "the cat sat on the mat and the dog sat on the log near the old cat house by the sea "
MAX_LENGTH = 48


def likelihoods(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """Requests of lm-eval for answers behind contexts."""
    return instances("loglikelihood", pairs)


def rolling(texts: Iterable[str]) -> list[Any]:
    return instances("loglikelihood_rolling", ((text,) for text in texts))


def generation(prompts: Iterable[str], **options: object) -> list[Any]:
    settings = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, **options}
    return instances("generate_until", ((prompt, settings) for prompt in prompts))


def instances(kind: str, arguments: Iterable[tuple[object, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def task_config(
    kind: str, rows: Sequence[Mapping[str, object]], name: str = "umim_own", **options: object
) -> dict[str, Any]:
    """A task of lm-eval over rows in memory."""

    def load(**_: object) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict({"test": Dataset.from_list([dict(row) for row in rows])})

    fixed = {"task": name, "custom_dataset": load, "test_split": "test", "output_type": kind}
    return {**fixed, **options}


def byte_tokenizer(alphabet: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """A BPE tokenizer trained on ``TEXT``, of all bytes or some; it adds no special tokens."""
    end = "<|endoftext|>"
    bpe = byte_level_bpe([TEXT], 290, [end], alphabet)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end)


def save_backbone(directory: Path, seed: int = 0) -> Path:
    """Save a tiny Llama with the tokenizer."""
    fast = byte_tokenizer()
    sizes = {"vocab_size": len(fast), "max_position_embeddings": MAX_LENGTH}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = random_model(tiny_config(initializer_range=0.02, **sizes, **ends), seed)
    with torch.no_grad():  # small random weights would make every token about equally likely
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def backbone_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="session")
def checkpoint_path(backbone_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    backbone = load_backbone(str(backbone_path))
    ids = backbone.encode(TEXT)
    spans = {tuple(ids[i : i + n]) for n, i in ((2, 1), (3, 4), (2, 8), (4, 12), (2, 0))}
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    Checkpoint.of(fresh_model(backbone, spans, seed=3)).recommending("prompt").save(path)
    return path


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the hub, which is out of reach; commands and workers run in it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path
