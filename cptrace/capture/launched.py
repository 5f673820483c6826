"""Runs whose ranks somebody else started: torchrun, or Slurm's srun. Each process is then one rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cptrace.errors import UsageError

_DEFAULT_PORT: Final = 29500
_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM: Final = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True)
class Launched:
    """What the launcher told this process.

    Attributes:
        by: The launcher's name.
        rank: This process's rank.
        n_ranks: Processes of the job.
        local_rank: Number of this process on its host, which is also the device that it takes.
        address: Host of rank 0.
        port: Port at which the ranks meet.
    """

    by: str
    rank: int
    n_ranks: int
    local_rank: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        """Return the variables by which torch.distributed finds the other ranks (`env://`)."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.n_ranks),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_launched(environment: Mapping[str, str]) -> Launched | None:
    """Return what a launcher said to this process, None where it was started by hand.

    Args:
        environment: The process's variables.

    Raises:
        UsageError: The variables contradict each other or are not numbers.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _read("torchrun", _TORCHRUN, environment, environment.get("MASTER_ADDR", "127.0.0.1"))
    if "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        return _read("Slurm", _SLURM, environment, environment.get("MASTER_ADDR") or first_host(nodes))
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list of nodes.

    Example:
        >>> first_host("gpu[003-006,010],login1")
        'gpu003'
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        return "127.0.0.1"
    name, number, rest = match.groups(default="")
    return f"{name}{number}{rest}"


def _read(by: str, names: tuple[str, str, str], environment: Mapping[str, str], address: str) -> Launched:
    rank, n_ranks, local_rank = (_number(by, name, environment) for name in names)
    port = _number(by, "MASTER_PORT", {"MASTER_PORT": str(_DEFAULT_PORT), **environment})
    if not rank < n_ranks:
        raise UsageError(f"{by} says {names[0]}={rank}, but {names[1]}={n_ranks}; ranks count from 0")
    return Launched(by, rank, n_ranks, local_rank, address, port)


def _number(by: str, name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        found = f"{name}={text!r}" if name in environment else f"no {name}"
        raise UsageError(f"{by} started this process, but its environment has {found}; it must be a number")
    return int(text)
