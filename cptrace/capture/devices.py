"""Which kind of device a run gets: `auto` takes CUDA where torch sees one, and always says why.

cptrace never imports torch, so torch is asked in a process of its own, and only on a machine that has a driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cptrace.capture.run_spec import CPU, CUDA_DEVICE
from cptrace.errors import RunError
from cptrace.labels import CPU_EMULATED, CUDA

AUTO: Final = "auto"
CHOICES: Final = (AUTO, CPU, CUDA_DEVICE)

_DEVICE_FILES: Final = ("nvidia[0-9]*", "dxg", "kfd")  # NVIDIA's, WSL's, AMD's
_TIMEOUT_S: Final = 60
_QUESTION: Final = (
    "import json, torch\n"
    "print(json.dumps({'version': torch.__version__, 'n_devices': torch.cuda.device_count()}))"
)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What a run gets.

    Attributes:
        name: `cpu` or `cuda`, as options say.
        reason: Why, for people.
    """

    name: str
    reason: str

    @property
    def kind(self) -> str:
        """The kind of device that reports name."""
        return CUDA if self.name == CUDA_DEVICE else CPU_EMULATED


def choose_device(
    name: str, *, needs_emulation: str | None = None, find: Callable[[], tuple[int, str]] | None = None
) -> DeviceChoice:
    """Return the device to run on.

    Args:
        name: One of `CHOICES`.
        needs_emulation: Why `auto` must not take CUDA, None where it may.
        find: Returns how many CUDA devices there are, and what was found; None to look here.

    Raises:
        RunError: CUDA was asked for, and torch sees no device.
    """
    if name == CPU:
        return DeviceChoice(CPU, "as asked for")
    if name == AUTO and needs_emulation is not None:
        return DeviceChoice(CPU, needs_emulation)
    n_devices, found = (find or find_cuda)()
    if n_devices:
        return DeviceChoice(CUDA_DEVICE, found if name == AUTO else "as asked for")
    if name == AUTO:
        return DeviceChoice(CPU, found)
    raise RunError(
        f"--device cuda: {found}; use --device cpu, or make `nvidia-smi` work and install a CUDA build of torch"
    )


def find_cuda() -> tuple[int, str]:
    """Return how many CUDA devices torch sees, and what was found, for people."""
    if not any(path for pattern in _DEVICE_FILES for path in Path("/dev").glob(pattern)):
        return 0, "this machine has no CUDA device"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0, "CUDA_VISIBLE_DEVICES hides all devices"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTION], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0, "there is a CUDA device, but torch does not start"
    n_devices, version = int(answer["n_devices"]), answer["version"]
    if not n_devices:
        return 0, f"there is a CUDA device, but torch {version} does not see it"
    return n_devices, f"torch {version} sees {n_devices} CUDA device" + ("" if n_devices == 1 else "s")
