"""lm-eval's cache of responses (``--use_cache``), one table for each model that answers.

lm-eval finds a response again by the text of its request alone: with one file, the answers of a
checkpoint would stand for those of another. Here the table in the file is named by a digest of
whatever decides the answers, so those of other models are never found.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

from lm_eval.api.model import CacheHook, hash_args

from umim_core.evaluation.scored_requests import Sizes
from umim_core.store.artifacts import canonical_json, sha256_bytes

_SIZES: Final = "umim sizes of "
_log: Final = logging.getLogger("lm_eval.umim")  # a child of lm-eval's logger


def table_name(identity: Mapping[str, object]) -> str:
    """Return the name of a model's table."""
    return f"umim-{sha256_bytes(canonical_json(identity).encode())}"


def use_own_table(
    hook: CacheHook, identity: Mapping[str, object], counted: Sequence[str] = ()
) -> None:
    """Let a cache read and write the responses of one model only.

    Args:
        hook: lm-eval's hook; without a cache, nothing is done. The cache that lm-eval asks is the
            same object.
        identity: Whatever decides the model's answers.
        counted: Fields of ``Sizes`` that this model's responses must have and former versions did
            not keep. Responses without them are not read: a mean over some of the requests would
            pass for one over all. They are made again, and a warning says so.
    """
    database: Any = hook.dbdict
    if database is None:
        return
    former = table_name(identity)
    name = table_name({**identity, "counted": [*counted]}) if counted else former
    there = type(database).get_tablenames(database.filename)
    if former in there and name not in there:
        _log.warning(
            "umim: the cache %s holds responses of this model without their %s, from a former "
            "version; they are not used, and every request is answered anew",
            database.filename,
            ", ".join(counted),
        )
    type(database)(database.filename, tablename=name).close()  # makes the table where it is missing
    database.tablename = name


def keep_sizes(hook: CacheHook, kind: str, arguments: tuple[Any, ...], sizes: Sizes) -> None:
    """Keep the tokens and units of a request next to its response, if there is a cache."""
    hook.add_partial(_SIZES + kind, arguments, astuple(sizes))


def cached_sizes(hook: CacheHook, kind: str, arguments: tuple[Any, ...]) -> Sizes | None:
    """Return the tokens and units of a request that was answered from the cache."""
    if hook.dbdict is None:
        return None
    sizes = hook.dbdict.get(hash_args(_SIZES + kind, arguments))
    return None if sizes is None else Sizes(*sizes)
