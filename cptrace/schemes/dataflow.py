"""What each op of a scheme needs from others of the same pass and layer: its data flow, hop by hop.

An order that the data flow asks for is *needed*; any other order between communication and attention is accidental,
and costs overlap for nothing. Needs are stated between kinds of ops. A need with shift s says: hop h of the consumer
needs hop h + s of the producer, and with it all hops before.

    ring forward     attention 0   attention 1   attention 2        attention h needs kv h-1
                        kv 0 ------^  kv 1 ------^                  kv h needs kv h-1, and no attention at all

Source: the algorithms in `instrumented/schemes`, whose labels name kinds and hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cptrace import labels
from cptrace.labels import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ATTENTION,
    COPY,
    MERGE,
    REDUCE_SCATTER,
    SEND_RECV,
)

ALL_HOPS: Final = 1_000_000
"""A shift that reaches all hops of the producer."""

KV: Final = ("kv", "kv+dkv")
DKV: Final = ("dkv",)
INPUTS: Final = ("q", "k", "v", "qkv", "dout")
OUTPUTS: Final = ("out", "dq", "dk", "dv", "dqkv")
ANY: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of op: its label, and what travels where that matters.

    Attributes:
        what: Name of its label.
        tensors: What it carries, as labels say; empty for anything.
    """

    what: str
    tensors: tuple[str, ...] = ANY

    def holds(self, what: str, tensor: str) -> bool:
        """Return whether an op with this label and this tensor is of the kind."""
        return what == self.what and (not self.tensors or tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Need:
    """One line of a data flow.

    Attributes:
        consumer: What needs.
        producer: What is needed.
        shift: Hop of the producer minus hop of the consumer; `ALL_HOPS` for all of them.
        passes: Passes that have the need.
        min_hop: First hop of the consumer that has it.
    """

    consumer: Kind
    producer: Kind
    shift: int = 0
    passes: tuple[str, ...] = labels.PASSES
    min_hop: int = 0


@dataclass(frozen=True, slots=True)
class DataFlow:
    """What the ops of a scheme need of each other.

    Attributes:
        needs: All needs.
        channels: Kinds of transfers that need nothing of each other, so that each may have a communicator of its own.
        buffers: Kinds of transfers that are received into buffers used by turns, with how many hops later attention
            reads the buffer.
    """

    needs: tuple[Need, ...]
    channels: tuple[Kind, ...] = ()
    buffers: tuple[tuple[Kind, int], ...] = ()


_ATTENTION: Final = Kind(ATTENTION)
_MERGE: Final = Kind(MERGE)
_OTHER_COPY: Final = Kind(COPY, ("",))
_KV: Final = Kind(SEND_RECV, KV)
_DKV: Final = Kind(SEND_RECV, DKV)
_BACKWARD: Final = (labels.BACKWARD,)


def _packs(*tensors: str) -> Kind:
    return Kind(COPY, tuple(f"{labels.PACKS}:{tensor}" for tensor in tensors))


def _unpacks(*tensors: str) -> Kind:
    return Kind(COPY, tuple(f"{labels.UNPACKS}:{tensor}" for tensor in tensors))


def _packed(what: str, *tensors: str) -> tuple[Need, ...]:
    """Return the needs of transfers on the copies that prepare them."""
    return tuple(Need(Kind(what, (tensor,)), _packs(tensor)) for tensor in tensors)


_RING_KV: Final = (
    Need(_ATTENTION, _KV, -1),
    Need(_KV, _KV, -1),
    Need(_MERGE, _ATTENTION),
    # With one buffer what came is copied aside, to be sent on while the next is received.
    *_packed(SEND_RECV, *KV),
    Need(_packs(*KV), _KV, -1),
)
_RING: Final = (
    *_RING_KV,
    *_packed(SEND_RECV, *DKV),
    Need(_packs(*DKV), _MERGE, 0, _BACKWARD),
    Need(_packs(*DKV), _ATTENTION, 0, _BACKWARD),
    Need(_packs(*DKV), _DKV, -1, _BACKWARD),
    Need(_DKV, _MERGE, 0, _BACKWARD),
    Need(_DKV, _ATTENTION, 0, _BACKWARD),
    Need(_DKV, _DKV, -1, _BACKWARD),
    Need(_MERGE, _DKV, -1, _BACKWARD),
    Need(_unpacks("dkv"), _DKV, 0, _BACKWARD),
)
# Transformer Engine's: the gradients travel behind the keys and values, one hop later.
_WITH_DKV: Final = ("kv+dkv", "dkv")
_TE_GRADIENTS: Final = Kind(SEND_RECV, _WITH_DKV)
_TE: Final = (
    *_RING_KV,
    *_packed(SEND_RECV, *DKV),
    Need(_packs(*_WITH_DKV), _MERGE, -1, _BACKWARD),
    Need(_packs(*_WITH_DKV), _ATTENTION, -1, _BACKWARD),
    Need(_packs(*_WITH_DKV), _TE_GRADIENTS, -1, _BACKWARD),
    Need(_unpacks("kv"), _KV, -1),
    Need(_ATTENTION, _unpacks("kv")),
    Need(_TE_GRADIENTS, _MERGE, -1, _BACKWARD),
    Need(_TE_GRADIENTS, _ATTENTION, -1, _BACKWARD),
    Need(_DKV, _TE_GRADIENTS, -1, _BACKWARD),
    Need(_MERGE, _TE_GRADIENTS, 0, _BACKWARD, min_hop=1),
    Need(_unpacks("dkv"), Kind(SEND_RECV), 0, _BACKWARD),
)
# The copy of a slice waits until the one before is sent, and attention on a slice comes behind the next one's copy.
_GATHER: Final = (
    Need(_ATTENTION, Kind(ALL_GATHER)),
    Need(Kind(REDUCE_SCATTER), _ATTENTION),
    *_packed(ALL_GATHER, "kv"),
    *_packed(REDUCE_SCATTER, "dkv"),
    Need(_packs("kv"), Kind(ALL_GATHER), -1),
    Need(_unpacks("dkv"), Kind(REDUCE_SCATTER)),
)
_TO_HEADS: Final = Kind(ALL_TO_ALL, INPUTS)
_FROM_HEADS: Final = Kind(ALL_TO_ALL, OUTPUTS)
_ULYSSES: Final = (
    Need(_ATTENTION, _TO_HEADS),
    Need(_FROM_HEADS, _ATTENTION),
    # Chunks that share K and V sum their gradients before they are sent.
    Need(Kind(ALL_TO_ALL, ("dk", "dv")), _MERGE, 0, _BACKWARD),
    *_packed(ALL_TO_ALL, "q", "k", "v", "dout"),
    Need(_unpacks(*OUTPUTS), _FROM_HEADS, ALL_HOPS),
)
_USP: Final = (
    *_RING,
    *_packed(ALL_TO_ALL, "q", "k", "v", "dout"),
    Need(_ATTENTION, _TO_HEADS),
    Need(_KV, _TO_HEADS),
    Need(_FROM_HEADS, _ATTENTION, ALL_HOPS),
    Need(_FROM_HEADS, _MERGE, ALL_HOPS),
    Need(_FROM_HEADS, _OTHER_COPY, ALL_HOPS),
    Need(_FROM_HEADS, _unpacks("dkv"), ALL_HOPS),
    Need(_FROM_HEADS, _DKV, ALL_HOPS),
    Need(_unpacks(*OUTPUTS), _FROM_HEADS, ALL_HOPS),
)
_TP: Final = (
    Need(Kind(ALL_REDUCE), _ATTENTION),
    *_packed(ALL_REDUCE, "out", "dq"),
    Need(_unpacks("out"), Kind(ALL_REDUCE, ("out",))),
    Need(_unpacks("dq"), Kind(ALL_REDUCE, ("dq",))),
)

_RING_BUFFERS: Final = ((_KV, 1),)
_RING_FLOW: Final = DataFlow(_RING, channels=(_KV, _DKV), buffers=_RING_BUFFERS)
_SLICES: Final = (Kind(ALL_GATHER), Kind(REDUCE_SCATTER))

FLOWS: Final[tuple[tuple[str, DataFlow], ...]] = (
    ("ring", _RING_FLOW),
    ("zigzag_ring", _RING_FLOW),
    ("striped_ring", _RING_FLOW),
    # Its messages share two slots, whatever is in them.
    ("te", DataFlow(_TE, buffers=((Kind(SEND_RECV), 1),))),
    ("all_gather", DataFlow(_GATHER)),
    ("all_gather_sliced", DataFlow(_GATHER, channels=_SLICES, buffers=((Kind(ALL_GATHER), 0),))),
    ("ulysses", DataFlow(_ULYSSES)),
    ("ulysses_chunked", DataFlow(_ULYSSES, channels=(_TO_HEADS, _FROM_HEADS))),
    ("usp", DataFlow(_USP, channels=(_KV, _DKV), buffers=_RING_BUFFERS)),
    ("tp", DataFlow(_TP)),
)


def find_flow(scheme: str) -> DataFlow | None:
    """Return the data flow of a scheme, None where none is known.

    Args:
        scheme: Name of a scheme.
    """
    return next((flow for name, flow in FLOWS if name == scheme), None)


def kinds_of(needs: Iterable[Need]) -> Sequence[Kind]:
    """Return the kinds that needs speak of, each once.

    Args:
        needs: Needs of a data flow.
    """
    return tuple(dict.fromkeys(kind for need in needs for kind in (need.consumer, need.producer)))
