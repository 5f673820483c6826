"""How a trace's table of ops names the process group of a collective: one text, the same on all its ranks."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_RANKS: Final = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")
_GROUP: Final = re.compile(r"(?P<name>.*) of (?P<size>\d+) ranks(?: (?P<ranks>\[[\d, ]+\]))?", re.DOTALL)


class ProcessGroup(NamedTuple):
    """A process group, as far as a trace tells.

    Attributes:
        name: Its name: a number that all ranks count alike, as a rule.
        n_ranks: Number of its ranks; None where it is not told.
        ranks: Its ranks; None where they are not told, or not all of them.
    """

    name: str
    n_ranks: int | None
    ranks: tuple[int, ...] | None


def group_text(name: str, n_ranks: int, ranks: str) -> str:
    """Return the text of a group.

    Args:
        name: Its name.
        n_ranks: Number of its ranks; 0 where it is not told.
        ranks: Its ranks as a list, such as `[0, 1]`; what is no list, or one that was cut, tells none.

    Example:
        >>> group_text("3", 4, "[0, 2, 4, 6]")
        '3 of 4 ranks [0, 2, 4, 6]'
        >>> group_text("0", 64, "[0, 1, 2, ...]")
        '0 of 64 ranks'
    """
    numbers = _numbers(ranks) if _RANKS.fullmatch(ranks.strip()) else ()
    n_ranks = n_ranks if n_ranks > 0 else len(numbers)
    if not n_ranks:
        return name
    listed = f" [{', '.join(map(str, numbers))}]" if len(numbers) == n_ranks else ""
    return f"{name} of {n_ranks} ranks{listed}"


def parse_group(text: str) -> ProcessGroup:
    """Return what the text of a group says.

    Args:
        text: Text as `group_text` makes it.

    Example:
        >>> parse_group("3 of 4 ranks [0, 2, 4, 6]").ranks
        (0, 2, 4, 6)
    """
    match = _GROUP.fullmatch(text)
    if match is None:
        return ProcessGroup(text, None, None)
    ranks = _numbers(match["ranks"]) if match["ranks"] else None
    return ProcessGroup(match["name"], int(match["size"]), ranks)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
