"""Mining refuses bad options before it reads the corpus, which may take hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from umim_core.backbone.backbone import Backbone
from umim_core.errors import ConfigError, CorpusError, EvaluationError, UmimError
from umim_core.mining.corpus_mining import mine_confident_spans, mine_rules
from umim_core.mining.mining_options import MiningOptions
from umim_core.text.sources import TextFiles

MISSING = TextFiles(paths=("no.txt",))
PLAIN = MiningOptions(segment_length=64)
BAD_PATTERN = MiningOptions(segment_length=64, protect=("(",))


def test_a_bad_pattern_is_refused_before_the_corpus_is_read(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    for options, error in ((PLAIN, CorpusError), (BAD_PATTERN, ConfigError)):
        with pytest.raises(error):
            mine_rules(MISSING, tmp_path / "out", tokenizer=str(tmp_path), options=options)


@pytest.mark.parametrize(
    ("options", "threshold", "error", "message"),
    [
        (PLAIN, 0.5, CorpusError, "no.txt"),
        (PLAIN, 1.5, ConfigError, "min_probability must lie between 0 and 1; got 1.5"),
        (BAD_PATTERN, 0.5, ConfigError, r"\("),
        (MiningOptions(segment_length=65), 0.5, EvaluationError, "64 positions; got 65 positions"),
    ],
    ids=["nothing wrong but the corpus", "threshold", "pattern", "positions"],
)
def test_confidence_options_are_refused_before_the_corpus_is_read(
    tmp_path: Path,
    tiny_llama: Backbone,
    options: MiningOptions,
    threshold: float,
    error: type[UmimError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        mine_confident_spans(
            MISSING,
            tmp_path / "out",
            backbone=tiny_llama,
            options=options,
            min_probability=threshold,
        )
