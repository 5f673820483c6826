"""What things are called: the parts of kernel names, and findings."""

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
    kept: list[str] = []
    angles = parentheses = 0
    for part in re.split(r"([<>()])", text):
        if part == "(" and not angles:
            kept = "".join(kept).split()[-1:]  # what stands before a blank is a return type
            break
        parentheses += (part == "(") - (part == ")")
        if not parentheses:  # inside them < and > compare
            angles += (part == "<") - (part == ">" and angles > 0)
        if not angles and part not in (")", ">"):
            kept.append(part)
    return re.sub(r"::(?=::)", "", "".join(kept)).removeprefix("::").strip() or demangled


def finding_name(code: str, form: str | None) -> str:
    """Return what people call a finding: its code, with its form where it has one.

    Args:
        code: Code of the finding.
        form: Form of it.
    """
    return f"{code} ({form})" if form else code
