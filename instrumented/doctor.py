"""Says as one JSON object what this Python can run: torch, CUDA, NCCL, and packages that import torch.

    python -m instrumented.doctor

Asked for by `cptrace doctor`, in a process of its own: a broken installation may crash it or never end.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from typing import Any, Final

_PACKAGES: Final = {"flash-attn": "flash_attn", "transformer-engine": "transformer_engine.pytorch"}


def find() -> dict[str, Any]:
    """Return what is here; what cannot be imported says why."""
    import torch

    cuda = torch.version.cuda
    is_available = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": {
            "built_for": cuda or torch.version.hip,
            "is_available": is_available,
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        },
        "nccl": _nccl(torch),
        "packages": {name: _package(name, module) for name, module in _PACKAGES.items()},
    }


def _nccl(torch: Any) -> str | None:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _package(name: str, module: str) -> dict[str, str | None]:
    """Return a package's version, and why it does not import, if it does not."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "error": None}
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return {"version": version, "error": " ".join(f"{type(error).__name__}: {error}".split())}
    return {"version": version, "error": None}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(find()) + "\n")
