"""Events of the Chrome trace format as text, a whole column at a time.

Source: "Trace Event Format" (Google, 2016). Times are microseconds there; they are written with three decimals, so that
every nanosecond is kept.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cptrace.intervals import BoolArray, Int64Array

Texts: TypeAlias = "pa.Array | pa.StringScalar"
"""JSON texts of N values, or one of them all; missing ones are left out where an object is made."""

_NS_PER_US: Final = 1000
_ROWS: Final = 100_000  # so that never all of a large trace lies in memory as text


def numbers(values: Any) -> pa.Array:
    """Return integers as JSON texts, missing ones missing.

    Args:
        values: Integers of shape (N,), perhaps nullable.
    """
    return pc.cast(pa.array(values, pa.int64()), pa.string())


def microseconds(values_ns: Int64Array) -> pa.Array:
    """Return times as JSON texts in microseconds, exact.

    Args:
        values_ns: Nanoseconds, not negative, of shape (N,).
    """
    whole, rest = np.divmod(values_ns, _NS_PER_US)
    digits = pc.utf8_lpad(numbers(rest), 3, "0")
    return pc.binary_join_element_wise(numbers(whole), digits, ".")


def texts(column: pd.Series) -> pa.Array:
    """Return names as JSON texts, each distinct one encoded once.

    Args:
        column: Categorical texts.
    """
    distinct = [json.dumps(str(text)) for text in column.cat.categories]
    codes = column.cat.codes.to_numpy()
    return coded(codes, distinct)


def coded(codes: Any, distinct: Sequence[str]) -> pa.Array:
    """Return JSON texts by their place among distinct ones; missing where the place is negative.

    Args:
        codes: Integers of shape (N,).
        distinct: JSON texts.
    """
    places = pa.array(np.asarray(codes, np.int64), mask=np.asarray(codes) < 0)
    return pc.take(pa.array(distinct, pa.string()), places)


def one(value: Any) -> pa.StringScalar:
    """Return the JSON text of a value that all events share.

    Args:
        value: Anything that JSON can hold.
    """
    return pa.scalar(json.dumps(value), pa.string())


def where(texts_of_all: pa.Array, is_there: BoolArray) -> pa.Array:
    """Return texts, missing where they do not apply.

    Args:
        texts_of_all: JSON texts of shape (N,).
        is_there: Which apply, bool of shape (N,).
    """
    return pc.if_else(pa.array(is_there), texts_of_all, None)


def objects(fields: Mapping[str, Texts], n_rows: int) -> pa.Array:
    """Return JSON objects, one per row, without the fields that a row lacks.

    Args:
        fields: JSON texts by key.
        n_rows: Number of objects.
    """
    opening = pa.array(["{"] * n_rows, pa.string())  # of this length, whatever is missing
    members = [_member(key, values, n_rows) for key, values in fields.items()]
    joined = pc.binary_join_element_wise(opening, *members, ", ", null_handling="skip")
    return pc.binary_join_element_wise(pc.replace_substring(joined, "{, ", "{", max_replacements=1), "}", "")


def _member(key: str, values: Texts, n_rows: int) -> pa.Array:
    name = json.dumps(key) + ": "
    if isinstance(values, pa.Scalar):
        return pa.array([name + values.as_py()] * n_rows, pa.string())
    return pc.binary_join_element_wise(name, values, "")


def write_document(path: Path, head: Mapping[str, Any], key: str, events: Iterable[pa.Array]) -> None:
    """Write a JSON object whose last member is an array of events, as gzip where the name ends so.

    Args:
        path: File to write.
        head: The other members.
        key: Name of the array.
        events: Events as JSON texts, part by part.
    """
    with path.open("wb") as raw:
        # Without a name and a time in the header, the same trace gives the same bytes.
        zipped = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else None
        file = zipped or raw
        members = json.dumps(dict(head), indent=1, allow_nan=False)[:-2]
        file.write(f"{members},\n {json.dumps(key)}: [".encode())
        mark = "\n"
        for part in events:
            for first in range(0, len(part), _ROWS):
                lines = part.slice(first, _ROWS).to_pylist()
                file.write((mark + ",\n".join(lines)).encode())
                mark = ",\n"
        file.write(b"\n ]\n}\n")
        if zipped is not None:
            zipped.close()
