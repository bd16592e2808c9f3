"""The rules of a corpus do not depend on workers, blocks or the order of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from support.tiny_mining import LENGTH, TAU, skewed_ids
from tasks.cluster.lease import ClusterLease
from tasks.stages.corpus import corpus_stage, tokenize_stage
from tasks.stages.mine import count_stage, filter_stage
from umim_core.config.corpus import FilesCorpus
from umim_core.config.recipe import Cell, ClusterConfig, MiningConfig
from umim_core.mining.corpus_mining import mine_rules
from umim_core.mining.mining_options import MiningOptions
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import sha256_file
from umim_core.text.sources import TextFiles

ORDERINGS = [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)]
# Every pair of workers, blocks and order occurs once.
CASES = [
    (cpus, block_tokens, ORDERINGS[(i + j) % 3])
    for i, cpus in enumerate((1, 2, 4))
    for j, block_tokens in enumerate((None, 5000, 700))
]


@dataclass(frozen=True)
class Texts:
    """Text files, and the SHA-256 of their rules' table, mined in one process."""

    folder: Path
    table: str
    min_documents: int

    def mine(
        self, root: Path, cpus: int, block_tokens: int | None, order: tuple[int, ...]
    ) -> tuple[str, str]:
        """Run all stages; return the digest of the rules and the SHA-256 of their table."""
        files = [str(self.folder / f"{number}.txt") for number in order]
        one = {"kind": "text", "paths": files[:1]}
        train = {"kind": "text", "paths": files}
        corpus = FilesCorpus.model_validate({"train": train, "valid": one, "test": one})
        cell = Cell(backbone=str(self.folder / "tokenizer"), tau=TAU)
        config = MiningConfig(block_tokens=block_tokens, min_documents=self.min_documents)
        with ClusterLease(ClusterConfig(cpus=cpus, workers=0)) as lease:
            assert lease.ensure().cpus == cpus
            raw = corpus_stage(root, corpus)
            tokenized = tokenize_stage(root, lease, raw, corpus, cell.backbone)
            counted = count_stage(root, lease, tokenized, cell, TAU, LENGTH, config)
        made = filter_stage(root, counted, tokenized, cell, LENGTH, config)
        rules = RuleSet.load(made.path / "rules")
        return rules.digest, sha256_file(made.path / "rules" / "rules.parquet")


def texts(folder: Path, tokenizer: PreTrainedTokenizerBase, words: int, files: int) -> Texts:
    tokenizer.save_pretrained(folder / "tokenizer")
    for number, ids in enumerate(np.array_split(skewed_ids(words), files)):
        text = " ".join(f"w{i}" if i else "<eos>" for i in ids)
        (folder / f"{number}.txt").write_text(text)
    documents = min(2, files)
    options = MiningOptions(tau=TAU, segment_length=LENGTH, min_documents=documents, threads=1)
    source = TextFiles(paths=(f"{folder}/*.txt",))
    tokenizer_name = str(folder / "tokenizer")
    report = mine_rules(source, folder / "rules", tokenizer=tokenizer_name, options=options)
    assert sum(report.rules.values()) > 100
    return Texts(folder, sha256_file(folder / "rules" / "rules.parquet"), documents)


@pytest.mark.full
def test_three_workers_give_the_table_of_one_process(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    # Of one file, for workers that tokenise take seconds to import what they need.
    found = texts(tmp_path, tiny_tokenizer, 5003, files=1)
    _, table = found.mine(tmp_path / "root", 3, 400, (0,))
    assert table == found.table


@pytest.mark.full
def test_workers_blocks_and_the_order_of_files_leave_the_digest_alone(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    found = texts(tmp_path, tiny_tokenizer, 12_007, files=5)
    mined = {case: found.mine(tmp_path / str(number), *case) for number, case in enumerate(CASES)}
    assert {table for _, table in mined.values()} == {found.table}
    assert len({digest for digest, _ in mined.values()}) == 1, mined
