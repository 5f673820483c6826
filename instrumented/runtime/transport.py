"""What moves data between the ranks of a CUDA run.

Each method queues one transfer on `stream`, a stream of torch's, which is also the current one: later work on it
comes after the transfer, earlier work before. Meanings are those of `instrumented.runtime.api.Device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from instrumented.runtime.api import Communicator, Message, Partition


class Transport(Protocol):
    """Moves data between ranks.

    Attributes:
        name: What the run's description calls it.
        kernel_prefix: What the names of its ops in the record begin with.
        shares_device: Whether all ranks are on one device.
    """

    name: str
    kernel_prefix: str
    shares_device: bool

    def communicator(self, name: str, partition: Partition | None) -> Communicator:
        """Return a new communicator of this rank's group; every rank must ask for the same ones in the same order."""

    def send_recv(
        self, stream: Any, communicator: Any, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        """Queue one grouped exchange."""

    def all_gather(
        self, stream: Any, communicator: Any, targets: Sequence[Sequence[Tensor]], sources: Sequence[Tensor]
    ) -> None:
        """Queue one grouped all-gather."""

    def reduce_scatter(
        self, stream: Any, communicator: Any, targets: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]
    ) -> None:
        """Queue one grouped reduce-scatter."""

    def all_reduce(self, stream: Any, communicator: Any, tensor: Tensor) -> None:
        """Queue one all-reduce in place."""

    def all_to_all(
        self, stream: Any, communicator: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> None:
        """Queue one all-to-all."""

    def close(self) -> None:
        """Leave all communicators."""
