"""The registry of implementations, and that each scheme it names exists."""

from __future__ import annotations

import pytest

from cptrace.errors import RunError, UsageError
from cptrace.impls import BUILTIN, IMPLS, NAMES, check_impl, find_impl, require_impl
from cptrace.schemes import SCHEMES


def test_names_are_unique_and_builtin_covers_everything_anywhere() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for scheme in SCHEMES:
        check_impl(BUILTIN, scheme.name, is_cuda=False, model="llama")


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_an_entry_says_what_a_user_needs(impl: object) -> None:
    entry = find_impl(impl.name)  # type: ignore[attr-defined]
    assert entry.summary
    assert set(entry.schemes) <= {scheme.name for scheme in SCHEMES}
    if entry.name != BUILTIN:
        assert entry.pip_line.startswith("pip install ")
        assert entry.import_name
        with pytest.raises(RunError, match="is not installed: pip install"):
            require_impl(entry.name, lambda _package: False)
        with pytest.raises(UsageError, match="has no scheme single"):
            check_impl(entry.name, "single", is_cuda=True)
    require_impl(entry.name, lambda _package: True)


def test_names_and_code_agree() -> None:
    from instrumented.impls import LIBRARIES

    assert [(item.name, tuple(item.schemes)) for item in LIBRARIES] == [
        (impl.name, impl.schemes) for impl in IMPLS if impl.name != BUILTIN
    ]
