"""What all commands of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells give it: 128 plus the number of the signal."""

# On every command itself: click remembers a command's help option from its first use, whoever its parent is then.
CONTEXT_SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}


def text_or_json(
    help_text: str = "Text for people, or JSON.", name: str = "output_format"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--format` of a command that prints text or JSON.

    Args:
        help_text: What the two are.
        name: Name of the command's parameter.
    """
    return click.option(
        "--format",
        name,
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help=help_text,
    )
