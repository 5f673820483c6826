"""What all commands of the command line share."""

from __future__ import annotations

from typing import Any, Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells give it: 128 plus the number of the signal."""

# On every command itself: click remembers a command's help option from its first use, whoever its parent is then.
CONTEXT_SETTINGS: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}
