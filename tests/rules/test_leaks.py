"""Secrets that published rules must not spell out; ordinary rules pass (reliability 48)."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.merged_models import fresh_model
from support.ngram_oracle import filtered
from support.tiny_models import tiny_model, word_tokenizer
from umim_core import UMIM
from umim_core.backbone.backbone import wrap_backbone
from umim_core.backbone.tokenizer_files import load_tokenizer
from umim_core.checkpoint.checkpoint import Checkpoint
from umim_core.embedded.assets import embedded_path
from umim_core.errors import CheckpointError, LeakError
from umim_core.mining.counting import count_ngrams
from umim_core.rules.leaks import check_export, leak_kind, scan_rules
from umim_core.rules.ruleset import RuleSet

TOKEN = "16C7e42F292c6912E7"
SECRETS = {
    "e-mail address": [
        "write to jane.doe@acme-corp.com today", "b.miller@uni-bonn.de", "e@acme.co.uk",
        "git@github.com e@acme.org",
    ],
    "API key": [
        f"ghp_{TOKEN}", f"key='github_pat_{TOKEN}'", "sk-proj-T3BlbkFJ9xQ2mZ7v",
        "AKIA3Q7YB2ZK5WXN8D4T", "xoxb-17653672481-19874698323", "hf_QdXcKpTzLmNvBwRsYg",
        "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6", "ghp_abC123",
    ],
    "private key": ["-----BEGIN RSA PRIVATE KEY-----", "BEGIN PRIVATE", " PRIVATE KEY-----"],
    "URL with password": ["postgres://admin:hunter2@db.acme", "//bob:s3cr@host"],
    "long number": [
        "call +49 170 5551234", "tel (415) 555-2671.", "tel: 415-555-2671", "tel 4155552671",
        "card 4539 1488 0343 6467", "card 4539148803436467", "card 4539 1488 0343 3",
        "tel 415564165",
    ],
}  # fmt: skip
ORDINARY = [
    "@dataclass", "@app.route", "x@y", "git@github.com", "me@example.com.", "sk-learn",
    "disk-based2", "AKIA", "hf_hub_download", "gh_token", "the private key",
    "user:password@localhost", "http://<user>:<key>@host", "2024-03-15 12:30", " 100000000",
    " 18446744073709551615", "0.1415926535897", "id_123456789", " 12345678-1234-5678",
    "1999 2000 2001 2002", "+1.5, -2.5", "ghp_abcD123", " 4539 1488 0340", " 41556416",
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"),
    [*((k, text) for k in SECRETS for text in SECRETS[k]), *((None, text) for text in ORDINARY)],
)
def test_secrets_are_told_by_their_kind_from_ordinary_text(kind: str | None, text: str) -> None:
    assert leak_kind(text) == kind


@pytest.mark.parametrize("text", [text for texts in SECRETS.values() for text in texts[:1]])
def test_a_secret_cut_into_4_grams_is_put_together_again(text: str) -> None:
    tokenizer = load_tokenizer("umim-docs-llama")
    ids = np.array(tokenizer(f"a {text} b", add_special_tokens=False)["input_ids"], dtype=np.int64)
    counts = count_ngrams(ids, np.array([0, len(ids)], dtype=np.int64), 1)
    rules = filtered(counts, overlap="none", containment="keep")
    leaks = scan_rules(rules, tokenizer)
    assert leaks
    assert all(tokenizer.decode(leak.span) in leak.text for leak in leaks)
    assert all(leak.text in f"a {text} b" for leak in leaks)


PIECES = ["<eos>", "ja", "ne", "@", "ac", "me", ".", "org", " hi", " you", "[UNK]"]


@pytest.fixture
def pieces() -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split("|", "removed")
    made = word_tokenizer(PIECES, split, unk_token="[UNK]", eos_token="<eos>")
    made.backend_tokenizer.decoder = decoders.Fuse()
    return made


# "jane@acme.org" in the 4-grams that a greedy filter may leave: each shares two tokens.
LEAKING = [(1, 2, 3, 4), (3, 4, 5, 6), (5, 6, 7, 8), (8, 9)]
JOINED: dict[str, tuple[list[tuple[int, ...]], list[str]]] = {
    "two tokens in common": (LEAKING, ["jane@acme.org hi"]),
    "longer ones by their length": (
        [(1, 2, 3, 4, 5), (2, 3, 4, 5, 6), (4, 5, 6, 7, 8), (3, 4)],
        ["jane@acme.org hi", "ne@acme.org hi"],
    ),
    "a choice": ([*LEAKING, (3, 4, 8, 9)], []),
    "a circle": ([(8, 9, 8, 9), (9, 8, 9, 8)], []),
}


@pytest.mark.parametrize("name", JOINED)
def test_rules_are_joined_that_follow_each_other_without_a_choice(
    pieces: PreTrainedTokenizerFast, name: str
) -> None:
    spans, texts = JOINED[name]
    leaks = scan_rules(RuleSet.from_spans(spans), pieces)
    assert [leak.text for leak in leaks] == texts
    for leak in leaks:
        assert leak.span in spans and (leak.kind, leak.count) == ("e-mail address", 1)


def test_an_export_is_refused_without_printing_the_secret(pieces: PreTrainedTokenizerFast) -> None:
    rules = RuleSet.from_spans(LEAKING)
    with pytest.raises(LeakError, match=r"1 of 4.*e-mail.*\(1, 2, 3, 4\).*min_documents") as error:
        check_export(rules, pieces)
    assert "acme" not in str(error.value)
    assert len(check_export(rules, pieces, "allow")) == 1
    for harmless in ([(8, 9)], []):
        assert check_export(RuleSet.from_spans(harmless), pieces) == []


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [("refuse", LeakError, "e-mail"), ("allow", CheckpointError, "must name its backbone")],
)
def test_the_hub_gets_leaking_rules_only_when_told_so(
    pieces: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
    policy: str,
    error: type[Exception],
    message: str,
) -> None:
    here = str(tmp_path_factory.mktemp("backbone"))  # a path is refused last, offline
    backbone = wrap_backbone(tiny_model(), pieces, name=here)
    checkpoint = Checkpoint.of(fresh_model(backbone, RuleSet.from_spans(LEAKING)))
    with pytest.raises(error, match=message):
        UMIM(backbone, checkpoint).push_to_hub("owner/name", leaks=policy)


def test_the_embedded_rules_leak_nothing() -> None:
    directory = embedded_path("umim-docs-llama", "checkpoint")
    assert directory is not None
    rules = RuleSet.load(directory / "rules")
    assert len(rules) > 100_000
    assert scan_rules(rules, load_tokenizer("umim-docs-llama")) == []
