"""Read corpora: documents from files and data sets, token ids, fixed-length segments."""

from umim_core.text.readers import BadRows, iter_documents, iter_parts
from umim_core.text.sources import (
    DocumentSource,
    HubDataset,
    JsonLines,
    ParquetFiles,
    Source,
    TextFiles,
    TokenIds,
    source_of,
)
from umim_core.text.tokens import (
    iter_token_ids,
    iter_token_pieces,
    segments,
    tokenize_documents,
    tokenize_parts,
)

__all__ = [
    "BadRows",
    "DocumentSource",
    "HubDataset",
    "JsonLines",
    "ParquetFiles",
    "Source",
    "TextFiles",
    "TokenIds",
    "iter_documents",
    "iter_parts",
    "iter_token_ids",
    "iter_token_pieces",
    "segments",
    "source_of",
    "tokenize_documents",
    "tokenize_parts",
]
