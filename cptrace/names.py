"""Parts of kernel names."""

from __future__ import annotations

import re


def function_name(demangled: str) -> str:
    """Return the qualified name of a kernel's function, without return type, template and call arguments.

    Args:
        demangled: Demangled kernel name.

    Example:
        >>> function_name("void flash::flash_fwd_kernel<Traits<(int)128>, (bool)0>(flash::Flash_fwd_params)")
        'flash::flash_fwd_kernel'
    """
    text = demangled.replace("(anonymous namespace)", "<unnamed>").removeprefix("void ")
    kept, depth = [], 0
    for part in re.split(r"([<>(])", text):
        if part == "(" and depth == 0:
            break
        depth += (part == "<") - (part == ">" and depth > 0)
        if depth == 0 and part != ">":
            kept.append(part)
    return re.sub(r"::(?=::)", "", "".join(kept)).strip() or demangled
