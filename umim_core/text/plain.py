"""Text files decoded chunk by chunk, so that one of any size takes a few MiB."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Final

from umim_core.errors import CorpusError
from umim_core.text.files import CorpusFile, typed_errors

Part = tuple[str, bool]  # text, and whether it ends its document

_BOM: Final = b"\xef\xbb\xbf"
_CHUNK_BYTES: Final = 1 << 20


def text_parts(file: CorpusFile) -> Iterator[Part]:
    """Yield a text file, which is one document, as it is decoded.

    Yields:
        (text of up to 1 MiB, whether it ends the document); nothing for a file without text.

    Raises:
        CorpusError: The file is unreadable, no UTF-8, or holds NUL; the message names the byte.
    """
    held = ""  # one part is held back, for the last one must be known as the last
    with file.open_unpacked() as stream:
        head = rest = b""
        start = 0  # of `rest` in the file, bytes
        final = False
        while not final:
            with typed_errors(file):
                chunk = stream.read(_CHUNK_BYTES)
            final = not chunk
            if not head:
                head = chunk[:4]
                if chunk.startswith(_BOM):
                    chunk, start = chunk[len(_BOM) :], len(_BOM)
            data = rest + chunk
            text, used = _decoded(file, data, start, head, final)
            rest = data[used:]
            start += used
            if text:
                if held:
                    yield held, False
                held = text
    if held:
        yield held, True


def _decoded(
    file: CorpusFile, data: bytes, start: int, head: bytes, final: bool
) -> tuple[str, int]:
    """Decode bytes that begin at byte `start` of the file, up to the last whole character."""
    if (position := data.find(b"\0")) >= 0:
        raise CorpusError(
            f"{file}: text must not hold NUL", f"NUL at byte {start + position}", _utf8_remedy(head)
        )
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{file}: text must be UTF-8",
            f"{error.reason} at byte {start + error.start}",
            _utf8_remedy(head),
        ) from error


def _utf8_remedy(head: bytes) -> str:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "The file looks like UTF-16: convert it to UTF-8."
    return "Convert the file to UTF-8, or leave it out."
