"""The needs of a scheme's data flow, for the ops of one trace: which order is needed, and which is accidental."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cptrace import labels
from cptrace.intervals import BoolArray, Int64Array
from cptrace.recognition.places import Places, by_hop
from cptrace.schemes.dataflow import ALL_HOPS, DataFlow, Kind, Need

_NO_NEED: Final = np.iinfo(np.int64).min // 2
_WEIGHT_GRADIENTS: Final = Kind(labels.ALL_REDUCE, (labels.GRADS,))
NO_READER: Final = np.iinfo(np.int64).max // 2
"""Added to a hop, it lies beyond any."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The data flow of a scheme, bound to the ops of a trace.

    Attributes:
        places: Where the ops belong.
        needs: The scheme's needs.
        channels: Kinds of transfers that need nothing of each other.
        buffers: Kinds of transfers received into buffers used by turns, and how many hops later those are read.
        shift: Largest shift of any need of a kind on a kind per pass (0 forward, 1 backward), int64 of shape
            (2, K, K): [pass, consumer, producer]; far below zero where there is no need.
        is_free: Whether a kind needs nothing of a kind, whatever blocks they are of, bool of shape (K, K):
            [consumer, producer].
    """

    places: Places
    needs: tuple[Need, ...]
    channels: tuple[Kind, ...]
    buffers: tuple[tuple[Kind, int], ...]
    shift: Int64Array
    is_free: BoolArray

    def is_needed(self, consumer: Int64Array, producer: Int64Array) -> BoolArray:
        """Return whether each consumer needs each producer, directly or as an earlier hop of what it needs.

        An order between blocks is needed: what a pass of a layer computes is the input of the next. Only the sums of
        weight gradients go nowhere but into the step's end.

        Args:
            consumer: Positions in `places`, int64 of shape (N,).
            producer: Positions in `places`, int64 of shape (N,).
        """
        places = self.places
        is_backward = places.is_backward[consumer].astype(np.int64)
        shift = self.shift[is_backward, places.kind[consumer], places.kind[producer]]
        is_needed: BoolArray = places.hop[producer] <= places.hop[consumer] + shift
        is_needed |= places.block[consumer] != places.block[producer]
        is_needed &= ~self.is_free[places.kind[consumer], places.kind[producer]]
        return is_needed

    def channel(self) -> Int64Array:
        """Return the number of each transfer's channel, -1 for what is no transfer, int64 of shape (M,).

        Sums of weight gradients have a channel of their own, and so has all that the scheme names none for.
        """
        kinds = self.places.kinds
        of_kind = np.where(kinds.are(*labels.COMMUNICATION), len(self.channels) + 1, -1)
        for number, channel in enumerate((*self.channels, _WEIGHT_GRADIENTS)):
            of_kind[_holds(channel, self.places)] = number
        return np.asarray(of_kind[self.places.kind], np.int64)

    def served_channel(self) -> Int64Array:
        """Return the number of the channel whose data each copy packs or unpacks, int64 of shape (M,).

        -1 for what is no such copy, and where what it serves travels on several channels, or on none.
        """
        channel, kinds = self.channel(), self.places.kinds
        served = np.full(len(kinds), -1)
        for number, (what, purpose) in enumerate(zip(kinds.what, kinds.tensor, strict=True)):
            if what == labels.COPY and purpose:
                carried = kinds.are(*labels.COMMUNICATION) & kinds.carry(purpose.partition(":")[2])
                channels = np.unique(channel[carried[self.places.kind]])
                served[number] = channels[0] if len(channels) == 1 else -1
        return np.asarray(served[self.places.kind], np.int64)

    def edges(self) -> tuple[Int64Array, Int64Array]:
        """Return positions (consumer, producer) of all direct needs; of `ALL_HOPS`, the last producer of the block."""
        consumers, producers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for need in self.needs:
            consumer, producer = self._edges_of(need)
            consumers.append(consumer)
            producers.append(producer)
        return np.concatenate(consumers), np.concatenate(producers)

    def reader_hop(self) -> Int64Array:
        """Return the hop of the attention that is to read the buffer of each transfer, int64 of shape (M,).

        It is that of the schedule, also where a mask leaves this rank nothing to read; beyond any hop for what is not
        received into buffers used by turns.
        """
        ahead = np.full(len(self.places.kinds), NO_READER)
        for kind, n_hops in self.buffers:
            ahead[_holds(kind, self.places)] = n_hops
        hop: Int64Array = self.places.hop + ahead[self.places.kind]
        return hop

    def _edges_of(self, need: Need) -> tuple[Int64Array, Int64Array]:
        places = self.places
        in_pass = np.isin(places.is_backward, [name == labels.BACKWARD for name in need.passes])
        consumers = by_hop(
            places, in_pass & _holds(need.consumer, places)[places.kind] & (places.hop >= need.min_hop)
        )
        producers = by_hop(places, in_pass & _holds(need.producer, places)[places.kind])
        if need.shift == ALL_HOPS:
            producers = producers.sort_values(["block", "hop"]).groupby("block", as_index=False).last()
            joined = consumers.merge(producers, on="block", suffixes=("", "_of_producer"))
        else:
            consumers = consumers.assign(hop=consumers["hop"] + need.shift)
            joined = consumers.merge(producers, on=["block", "hop"], suffixes=("", "_of_producer"))
        consumer, producer = (joined[name].to_numpy() for name in ("position", "position_of_producer"))
        return consumer[consumer != producer], producer[consumer != producer]


def bind(flow: DataFlow, places: Places) -> Flow:
    """Return a scheme's data flow bound to the ops of a trace.

    Args:
        flow: The scheme's data flow.
        places: Where the ops belong.
    """
    n_kinds = len(places.kinds)
    shift = np.full((len(labels.PASSES), n_kinds, n_kinds), _NO_NEED)
    for need in flow.needs:
        pairs = np.ix_(_holds(need.consumer, places), _holds(need.producer, places))
        for name in need.passes:
            of_pass = shift[int(name == labels.BACKWARD)]
            of_pass[pairs] = np.maximum(of_pass[pairs], need.shift)
    # What a model does around attention, and copies that do not say what for, make what is sent or use what has
    # arrived, so no order with them is accidental.
    tensors = np.array(places.kinds.tensor, object)
    is_around = ~places.kinds.are(labels.ATTENTION, labels.MERGE, *labels.COMMUNICATION)
    is_around &= ~(places.kinds.are(labels.COPY) & (tensors != ""))
    is_around |= np.isin(tensors, labels.MODEL_TENSORS)
    shift[:, is_around, :] = ALL_HOPS
    shift[:, :, is_around] = ALL_HOPS
    is_sum = _holds(_WEIGHT_GRADIENTS, places)
    is_free = np.outer(~is_sum & ~places.kinds.are(labels.GRAD_NORM), is_sum)
    return Flow(places, flow.needs, flow.channels, flow.buffers, shift, is_free)


def _holds(kind: Kind, places: Places) -> BoolArray:
    """Return which kinds of a trace are of a kind of the data flow, bool of shape (K,)."""
    pairs = zip(places.kinds.what, places.kinds.tensor, strict=True)
    return np.array([kind.holds(what, tensor) for what, tensor in pairs], bool)
