"""Parts of a table merged into one: the same as joined and then sorted."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from cptrace.intervals import Int64Array
from cptrace.sources.columns import category, merge_columns, merged_places, nullable

TEXTS = (("gemm", "nccl"), ("memcpy", "gemm"), ("memset",))


def _keys(seed: int) -> list[Int64Array]:
    rng = np.random.default_rng(seed)
    return [np.sort(rng.integers(0, 40, n)) for n in (50, 7, 20)]


@pytest.mark.parametrize("seed", range(5))
def test_merged_integers_are_the_joined_ones_in_stable_order(seed: int) -> None:
    keys = _keys(seed)
    rows = [np.arange(len(key)) + 100 * i for i, key in enumerate(keys)]
    places = merged_places(keys)
    order = np.argsort(np.concatenate(keys), kind="stable")
    np.testing.assert_array_equal(merge_columns(keys, places), np.sort(np.concatenate(keys)))
    np.testing.assert_array_equal(merge_columns(rows, places), np.concatenate(rows)[order])


@pytest.mark.parametrize("seed", range(5))
def test_missing_integers_stay_missing_where_they_come(seed: int) -> None:
    keys = _keys(seed)
    rng = np.random.default_rng(seed)
    parts = [nullable(key * 3, None if i == 1 else rng.random(len(key)) < 0.5) for i, key in enumerate(keys)]
    merged = merge_columns(parts, merged_places(keys))
    joined = pd.concat([pd.Series(part) for part in parts], ignore_index=True)
    order = np.argsort(np.concatenate(keys), kind="stable")
    assert merged.dtype == "Int64"
    pd.testing.assert_series_equal(pd.Series(merged), joined.iloc[order].reset_index(drop=True))


@pytest.mark.parametrize("seed", range(5))
def test_texts_are_named_alike_whichever_part_they_come_from(seed: int) -> None:
    keys = _keys(seed)
    rng = np.random.default_rng(seed)
    codes = [rng.integers(-1, len(texts), len(key)) for key, texts in zip(keys, TEXTS, strict=True)]
    parts = [category(code, texts) for code, texts in zip(codes, TEXTS, strict=True)]
    merged = merge_columns(parts, merged_places(keys))
    joined = np.concatenate([np.asarray(part, dtype=object) for part in parts])
    order = np.argsort(np.concatenate(keys), kind="stable")
    assert list(merged.categories) == ["gemm", "nccl", "memcpy", "memset"]
    pd.testing.assert_series_equal(
        pd.Series(np.asarray(merged, dtype=object)), pd.Series(joined[order]), check_names=False
    )


def test_one_part_keeps_its_rows() -> None:
    key = np.array([1, 1, 4])
    np.testing.assert_array_equal(merge_columns([key], merged_places([key])), key)
