"""The faults that a run can be given on purpose: what each one breaks, and which finding it must cause.

A diagnosis is worth something if it finds what is known to be there. `instrumented/faults.py` binds the same
names to code. Where a fault changes nothing, because data flow forces the same order anyway, asking for it is
an error: a run without the effect would be a wrong answer sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cptrace.errors import UsageError
from cptrace.schemes import STRIPED, ZIGZAG, AttentionShape, find_scheme
from cptrace.schemes.transformer import LLAMA

SHARED_STREAM: Final = "shared-stream"
HOST_SYNC: Final = "host-sync"
NO_WAIT: Final = "no-wait"
SINGLE_BUFFER: Final = "single-buffer"
SHARED_COMMUNICATOR: Final = "shared-communicator"
LATE_LAUNCH: Final = "late-launch"
STRAGGLER: Final = "straggler"
UNBALANCED: Final = "unbalanced"
SLOW_LINK: Final = "slow-link"

_RINGS: Final = ("ring", "zigzag_ring", "striped_ring")
_FORCED: Final = "data flow needs every transfer where it is"
_FLOPS_PER_PAIR: Final = 10  # five matrix products backward
_LEAST_SUM_BYTES: Final = 4  # of an element of summed gradients
_CLEARLY: Final = 1.1  # by how much more time two transfers must take than what hides them


class FaultRequest(NamedTuple):
    """A fault asked for by name: which, and on which rank where it is one rank's."""

    name: str
    rank: int | None = None


class RunOptions(Protocol):
    """The options of a run on which it depends what a fault changes."""

    @property
    def scheme(self) -> str:
        """Name of the scheme."""

    @property
    def cp_size(self) -> int:
        """Ranks that share the sequence."""

    @property
    def n_ranks(self) -> int:
        """All ranks, also those that share a part of the sequence."""

    @property
    def sequence_ranks(self) -> int:
        """Ranks that have parts of the sequence, and the same weights."""

    @property
    def model(self) -> str:
        """What is computed."""

    @property
    def layers(self) -> int:
        """Layers in sequence."""

    @property
    def shape(self) -> AttentionShape:
        """Sizes, with padding."""

    @property
    def link_gbps(self) -> float:
        """Modelled link bandwidth, gigabits per second."""

    @property
    def compute_gflops(self) -> float:
        """Modelled compute speed, 10^9 operations per second."""

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward pass."""

    @property
    def clock(self) -> str:
        """Where times come from."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults asked for."""


@dataclass(frozen=True, slots=True)
class FaultInfo:
    """One fault.

    Attributes:
        name: Its name on the command line.
        summary: What it breaks, in one line.
        finding: Code of the finding that it must cause.
        why_not: Returns why it would change nothing in a run, None where it changes something.
        form: Form of the finding; None for findings of one form.
        takes_rank: Whether it is one rank's, and is asked for as `NAME:RANK`.
        hidden_by: Faults beside which it changes nothing.
        has_undefined_results: Whether results may be wrong, so that checking them says nothing.
    """

    name: str
    summary: str
    finding: str
    why_not: Callable[[RunOptions], str | None]
    form: str | None = None
    takes_rank: bool = False
    hidden_by: tuple[str, ...] = ()
    has_undefined_results: bool = False

    @property
    def usage(self) -> str:
        """How it is asked for."""
        return f"{self.name}:RANK" if self.takes_rank else self.name

    @property
    def expected(self) -> str:
        """The finding that it must cause, with its form."""
        return f"{self.finding}: {self.form}" if self.form else self.finding


def _scheme_in_effect(options: RunOptions) -> str:
    """Return the scheme whose data flow a run has: the limits of some schemes are other schemes."""
    if options.scheme == "usp" and options.shape.ulysses_size == options.cp_size:
        return "ulysses"
    if options.scheme == "all_gather_sliced" and options.shape.kv_heads == 1:
        return "all_gather"
    return options.scheme


def _n_ring_hops(options: RunOptions) -> int:
    """Return how many chunks a ring of a run works on; 1 where there is no ring."""
    scheme = _scheme_in_effect(options)
    if scheme == "usp":
        return options.cp_size // options.shape.ulysses_size
    return options.cp_size if scheme in (*_RINGS, "te") else 1


def _sums_gradients(options: RunOptions) -> bool:
    """Return whether a layer's gradients are summed over ranks beside the backward pass of the layers below."""
    has_gradients = options.model == LLAMA and not options.forward_only
    return has_gradients and options.layers > 1 and options.sequence_ranks > 1


def _needs_overlap(options: RunOptions) -> str | None:
    has_slices = _scheme_in_effect(options) in ("all_gather_sliced", "ulysses_chunked")
    if has_slices or _n_ring_hops(options) > 1 or _sums_gradients(options):
        return None
    return _needs_transfers(options) or f"{_FORCED} in scheme {options.scheme}; use {_use(*_RINGS, 'te')}"


def _needs_ring(options: RunOptions) -> str | None:
    if _n_ring_hops(options) > 1:
        return None
    reason = _needs_overlap(options) or "what overlaps has been queued before the host waits for one of it"
    return reason if "use --scheme" in reason else f"{reason}; use {_use(*_RINGS, 'te')}"


def _needs_transfers(options: RunOptions) -> str | None:
    return "one rank has no transfers" if options.n_ranks == 1 else None


def _needs_used_buffer(options: RunOptions) -> str | None:
    n_hops = _n_ring_hops(options)
    if n_hops == 1:
        return f"scheme {options.scheme} has no ring buffers here; use {_use(*_RINGS, 'te')}"
    returns_at_once = options.scheme == "te" and not options.forward_only
    if n_hops == 2 and not returns_at_once:
        return "a ring of 2 receives into a buffer that nothing has read yet; use more ranks"
    return None


def _needs_two_transfers(options: RunOptions) -> str | None:
    scheme = _scheme_in_effect(options)
    if scheme != "all_gather_sliced" and (scheme == "te" or _n_ring_hops(options) == 1):
        schemes = _use(*_RINGS, "all_gather_sliced", "usp")
        return f"scheme {options.scheme} has no two independent transfers under way at once; use {schemes}"
    if options.forward_only:
        return "in a forward pass nothing travels beside K and V; leave out --forward-only"
    if scheme == "all_gather_sliced" or options.clock == "real":
        return None
    return _needs_slow_link(options)


def _needs_slow_link(options: RunOptions) -> str | None:
    """Both transfers of a hop, one after another, may still fit behind its attention backward.

    A ring of 2 sends K and V once, at its start; they only stand in the way of the first gradients, which have
    the second hop's attention to hide behind.
    """
    shape = options.shape
    u = shape.ulysses_size if options.scheme == "usp" else 1
    halves = 2 if shape.is_causal and options.scheme != "ring" else 1
    n_pairs = (shape.local_len * u) ** 2 // halves
    attention_ns = _FLOPS_PER_PAIR * n_pairs * shape.heads // u * shape.head_dim / options.compute_gflops
    sum_bytes = max(_LEAST_SUM_BYTES, shape.element_bytes)
    kv_bytes = shape.element_bytes if _n_ring_hops(options) > 2 else 0
    n_bits = 8 * 2 * shape.chunk_elements * (kv_bytes + sum_bytes)
    if n_bits / options.link_gbps > _CLEARLY * attention_ns:
        return None
    slow_gbps = n_bits / attention_ns / _CLEARLY**2
    return (
        f"what is sent fits behind attention one after another too; use --link-gbps {slow_gbps:.2g}, or less"
    )


def _needs_balance(options: RunOptions) -> str | None:
    scheme = find_scheme(_scheme_in_effect(options))
    if scheme.causal_layout not in (ZIGZAG, STRIPED):
        works = "is that already" if scheme.name == "ring" else "does the same work on every rank anyway"
        return (
            f"scheme {options.scheme} {works}; use {_use('zigzag_ring', 'striped_ring', 'te', 'all_gather')}"
        )
    return None if options.shape.is_causal else "without a mask all tokens are the same work; use --causal"


def _needs_nothing(options: RunOptions) -> str | None:
    return None


def _needs_model(options: RunOptions) -> str | None:
    if options.clock == "real":
        return "the real clock has no model of speed to change; use --clock paced or virtual"
    return _needs_transfers(options)


def _use(*schemes: str) -> str:
    return f"--scheme {', '.join(schemes)}"


FAULTS: Final[tuple[FaultInfo, ...]] = (
    FaultInfo(
        name=SHARED_STREAM,
        summary="transfers are queued on the compute stream, as collectives with async_op=False are",
        finding="shared-stream",
        why_not=_needs_overlap,
    ),
    FaultInfo(
        name=HOST_SYNC,
        summary="the host, not a stream, waits before each transfer and before each reader of received data",
        finding="missing-event",
        form="host-sync",
        why_not=_needs_ring,
        hidden_by=(SHARED_STREAM,),
    ),
    FaultInfo(
        name=NO_WAIT,
        summary="computing does not wait for received data: a race, so results are undefined and not checked",
        finding="missing-event",
        form="race",
        why_not=_needs_transfers,
        hidden_by=(SHARED_STREAM, HOST_SYNC),
        has_undefined_results=True,
    ),
    FaultInfo(
        name=SINGLE_BUFFER,
        summary="a ring receives into one buffer, not two: a hop waits for the reader of the chunk before",
        finding="single-buffer",
        why_not=_needs_used_buffer,
        hidden_by=(SHARED_STREAM, HOST_SYNC),
    ),
    FaultInfo(
        name=SHARED_COMMUNICATOR,
        summary="K and V and their gradients travel on one communicator and its one stream, one after another",
        finding="shared-communicator",
        why_not=_needs_two_transfers,
        hidden_by=(SHARED_STREAM, HOST_SYNC),
    ),
    FaultInfo(
        name=LATE_LAUNCH,
        summary="the host is busy before each launch for longer than the op takes",
        finding="late-launch",
        why_not=_needs_nothing,
    ),
    FaultInfo(
        name=STRAGGLER,
        summary="one rank computes at half the speed",
        finding="peer-wait",
        form="straggler",
        why_not=_needs_model,
        takes_rank=True,
    ),
    FaultInfo(
        name=UNBALANCED,
        summary="contiguous chunks under a causal mask, where the scheme's own layout would balance the work",
        finding="imbalance",
        why_not=_needs_balance,
    ),
    FaultInfo(
        name=SLOW_LINK,
        summary="one rank's transfers take four times as long",
        finding="peer-wait",
        form="slow-link",
        why_not=_needs_model,
        takes_rank=True,
    ),
)


def parse_fault(text: str) -> FaultRequest:
    """Return the fault that `NAME` or `NAME:RANK` asks for.

    Args:
        text: What stands after `--fault`.

    Raises:
        UsageError: No fault is called so, or it needs a rank and has none, or the other way round.

    Example:
        >>> parse_fault("straggler:2")
        FaultRequest(name='straggler', rank=2)
    """
    name, colon, rank = text.partition(":")
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    if fault is None:
        names = ", ".join(fault.usage for fault in FAULTS)
        raise UsageError(f"--fault {text}: no such fault; choose one of {names}")
    if fault.takes_rank and not (rank.isascii() and rank.isdecimal()):
        raise UsageError(f"--fault {text}: it is one rank's; say which, for example --fault {name}:1")
    if not fault.takes_rank and colon:
        raise UsageError(f"--fault {text}: it is all ranks'; use --fault {name}")
    return FaultRequest(name, int(rank) if fault.takes_rank else None)


def find_fault(name: str) -> FaultInfo:
    """Return the fault called `name`, which `parse_fault` has accepted."""
    return next(fault for fault in FAULTS if fault.name == name)


def reason_not_applicable(fault: FaultInfo, options: RunOptions) -> str | None:
    """Return why a fault would change nothing in a run, None where it changes something.

    Args:
        fault: The fault.
        options: The run's options; its other faults count, since one may hide another.
    """
    others = {parse_fault(text).name for text in options.faults} - {fault.name}
    if hiding := sorted(others & set(fault.hidden_by)):
        return f"{hiding[0]} puts everything into the order that it would change"
    return fault.why_not(options)


def check_faults(options: RunOptions) -> None:
    """Check that each fault of a run can be asked for and changes something.

    Args:
        options: The run's options.

    Raises:
        UsageError: One cannot, or is asked for twice; the message says why and for which schemes it could.
    """
    requests = [parse_fault(text) for text in options.faults]
    for text, request in zip(options.faults, requests, strict=True):
        if request.rank is not None and request.rank >= options.n_ranks:
            raise UsageError(f"--fault {text}: the ranks are 0 to {options.n_ranks - 1}")
        if requests.count(request) > 1:
            raise UsageError(f"--fault {text}: asked for twice")
        if reason := reason_not_applicable(find_fault(request.name), options):
            raise UsageError(f"--fault {text} would change nothing: {reason}")


def has_undefined_results(faults: Sequence[str]) -> bool:
    """Return whether a run with these faults may compute anything, so that its results are not checked."""
    return any(find_fault(parse_fault(text).name).has_undefined_results for text in faults)
