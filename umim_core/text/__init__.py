"""Read corpora: documents from files and data sets, token ids, fixed-length segments."""

from umim_core.text.readers import BadRows, iter_documents
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
    segments,
    tokenize_documents,
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
    "iter_token_ids",
    "segments",
    "source_of",
    "tokenize_documents",
]
