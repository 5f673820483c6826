"""The text of a PyTorch profiler trace: opened, unpacked, checked to be whole JSON, and cut into runs of events.

Plain files are mapped into memory and gzip files unpacked into one buffer: the text is held once. One pass over it
checks its structure and finds the array of events, wherever among the other keys that stands. The array is then cut
into runs of some thousand events, so that never all of them lie in memory as objects.
"""

from __future__ import annotations

import gzip
import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from cptrace.errors import SourceError

Text: TypeAlias = "bytes | bytearray | mmap.mmap | memoryview"
T = TypeVar("T")

GZIP_MAGIC: Final = b"\x1f\x8b"
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_EXPORT: Final = "export the trace again with prof.export_chrome_trace"
_FIRST_BYTES: Final = 4096
_BLOCK_BYTES: Final = 1 << 20
_RUN_BYTES: Final = 1 << 20
_BETWEEN_OBJECTS: Final = re.compile(rb"\}\s*,\s*(?=\{)")
# What versions of Kineto wrote that is no JSON: what C++ prints for a division by zero and a bare N/A; line breaks and
# backslashes in names; halves of the pairs that UTF-16 needs. It is mended where a file cannot be read otherwise.
_NO_NUMBER: Final = re.compile(rb'(":\s*)(?:-?inf|-?nan|-?Infinity|NaN|N/A)(?=\s*[,}])')
_ESCAPE: Final = re.compile(
    rb'(?i)(\\ud[89ab]..\\ud[c-f]..|\\u(?!d[89a-f])[0-9a-f]{4}|\\["\\/bfnrt])|(\\u[0-9a-f]{4})|\\'
)
_CONTROLS_AS_BLANKS: Final = bytes.maketrans(bytes(range(32)), b" " * 32)


class Document(msgspec.Struct, rename="camel"):
    """The top level of a trace, each value as text; empty where there is none.

    Attributes:
        trace_events: Array of events.
        schema_version: Version of the layout.
        device_properties: Array with one object per GPU.
        distributed_info: Rank, size and process groups of the job.
        base_time_nanoseconds: UTC of time 0 in ns since 1970; times were absolute before PyTorch 2.4.
        trace_name: Path that the trace was exported to.
        cptrace: What our own export adds, see `cptrace.exports.kineto`.
    """

    trace_events: msgspec.Raw = msgspec.Raw(b"")
    schema_version: msgspec.Raw = msgspec.Raw(b"")
    device_properties: msgspec.Raw = msgspec.Raw(b"")
    distributed_info: msgspec.Raw = msgspec.Raw(b"")
    base_time_nanoseconds: msgspec.Raw = msgspec.Raw(b"")
    trace_name: msgspec.Raw = msgspec.Raw(b"")
    cptrace: msgspec.Raw = msgspec.Raw(b"")


# Older versions of msgspec raise the second for what is not UTF-8.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError)
_DOCUMENTS: Final = msgspec.json.Decoder(Document)


def is_json_object(path: Path) -> bool:
    """Return whether a file, gzip or plain, begins like a JSON object.

    Args:
        path: Path of the file.

    Raises:
        SourceError: The file is a gzip file that cannot be unpacked.
    """
    with path.open("rb") as file:
        first_bytes = file.read(_FIRST_BYTES)
    if first_bytes.startswith(GZIP_MAGIC):
        first_bytes = next(_unpacked(path, _FIRST_BYTES), b"")
    return first_bytes.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")


def read_document(path: Path, is_wanted: Callable[[], bool]) -> Document:
    """Return the top level of a trace file.

    Args:
        path: Path of the file, gzip or plain.
        is_wanted: Asked now and then whether to go on; where it says no, any document may be returned.

    Raises:
        SourceError: The file is damaged, cut short or no trace.
    """
    text = _text(path, is_wanted)
    if not is_wanted():
        return Document()
    try:
        document = _decode(text)
    except msgspec.DecodeError as error:
        cut = f"the file is cut short after {len(text):,} bytes of JSON"
        what = cut if _is_cut_short(error) else f"damaged JSON ({error})"
        raise SourceError(f"{path}: {what}; copy it again, or {_EXPORT}") from error
    if bytes(memoryview(document.trace_events)[:1]) != b"[":
        raise SourceError(
            f"{path}: JSON without an array traceEvents, so no PyTorch profiler trace; {_EXPORT}"
        )
    return document


def decode_value(raw: msgspec.Raw) -> Any:
    """Return a value of the top level; None where it is missing or cannot be understood.

    Args:
        raw: Its text, known to be JSON but perhaps not UTF-8.
    """
    try:
        return msgspec.json.decode(as_utf8(raw)) if len(memoryview(raw)) else None
    except UNREADABLE:
        return None


def as_utf8(raw: msgspec.Raw) -> bytes:
    """Return a text in UTF-8; what is none is replaced by U+FFFD.

    Args:
        raw: Text of JSON.
    """
    return bytes(raw).decode("utf-8", "replace").encode()


def event_runs(events: msgspec.Raw, decode: Callable[[bytes], T | None]) -> Iterator[tuple[T, float]]:
    """Yield the events run by run as `decode` returns them, each with how much of all is done then, from 0 to 1.

    Args:
        events: Text of the array of events, known to be whole JSON.
        decode: Returns what an array of events holds, or None where the text is no array. A run is cut at what looks
            like the end of an event; only at a real end is the text before it, in brackets, an array.
    """
    text = memoryview(events)[1:-1]
    start, length = 0, _RUN_BYTES
    while start < len(text):
        between = _BETWEEN_OBJECTS.search(text, min(start + length, len(text)))
        stop, following = (between.start() + 1, between.end()) if between else (len(text), len(text))
        decoded = decode(b"".join((b"[", text[start:stop], b"]")))
        if decoded is None and between:
            length = 2 * (stop - start)
            continue
        if decoded is not None:
            yield decoded, stop / len(text)
        start, length = following, _RUN_BYTES


def _text(path: Path, is_wanted: Callable[[], bool]) -> Text:
    with path.open("rb") as file:
        if not file.read(2).startswith(GZIP_MAGIC):
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    text = bytearray()
    for block in _unpacked(path, _BLOCK_BYTES):
        text += block  # grows in place: blocks joined at the end would lie in memory twice
        if not is_wanted():
            break
    return text


def _unpacked(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Yield the content of a gzip file block by block."""
    try:
        with gzip.open(path) as file:
            while block := file.read(block_bytes):
                yield block
    except EOFError as error:
        raise SourceError(f"{path}: the gzip file is cut short; copy it again, or {_EXPORT}") from error
    except (OSError, zlib.error) as error:
        raise SourceError(f"{path}: damaged gzip file ({error}); copy it again, or {_EXPORT}") from error


def _decode(text: Text) -> Document:
    if bytes(text[: len(BYTE_ORDER_MARK)]) == BYTE_ORDER_MARK:
        text = memoryview(text)[len(BYTE_ORDER_MARK) :]
    try:
        return _DOCUMENTS.decode(text)
    except msgspec.DecodeError as error:
        mended = None if _is_cut_short(error) else _mend(text)
        if mended is None:
            raise
        return mended


def _is_cut_short(error: msgspec.DecodeError) -> bool:
    return "truncated" in str(error)


def _mend(text: Text) -> Document | None:
    """Return the document in a text that is nearly JSON, None where it is not."""
    mended = _NO_NUMBER.sub(rb"\1null", bytes(text).translate(_CONTROLS_AS_BLANKS))
    try:
        return _DOCUMENTS.decode(_ESCAPE.sub(_mend_escape, mended))
    except msgspec.DecodeError:
        return None


def _mend_escape(match: re.Match[bytes]) -> bytes:
    return match[1] or (rb"\ufffd" if match[2] else rb"\\")
