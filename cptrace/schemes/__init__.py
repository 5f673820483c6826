"""The context-parallel schemes that can be run: what each one sends, how it lays tokens out, what it asks for.

The formulas count what one rank sends for one layer, batch 1. `instrumented/schemes` binds the same names to
code, and a test compares the formulas with what runs record, byte for byte.

In the formulas S is tokens, P ranks, q = (S/P) Hq D e one rank's queries, c = (S/P) Hkv D e its K or its V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cptrace.errors import UsageError
from cptrace.schemes import memory, needs, traffic
from cptrace.schemes.memory import Memory
from cptrace.schemes.shape import ELEMENT_BYTES, AttentionShape
from cptrace.schemes.traffic import Traffic

__all__ = [
    "CONTIGUOUS",
    "ELEMENT_BYTES",
    "HEADS",
    "SCHEMES",
    "STRIPED",
    "ZIGZAG",
    "AttentionShape",
    "SchemeInfo",
    "Traffic",
    "find_scheme",
    "names_with_option",
]

CONTIGUOUS: Final = "contiguous"
ZIGZAG: Final = "zigzag"
STRIPED: Final = "striped"
HEADS: Final = "heads"


@dataclass(frozen=True, slots=True)
class SchemeInfo:
    """One scheme: what it is called, how it communicates, how much, and what it needs.

    Attributes:
        name: Its name on the command line.
        summary: One line for lists.
        pattern: The collective kinds it uses.
        layout: How it places tokens on ranks: contiguous, zigzag or striped; `heads` splits no tokens.
        causal_layout: The same where attention is causal.
        forward_formula: Bytes that one rank sends in one layer's forward pass, for people.
        backward_formula: The same for the backward pass.
        limits: What it cannot do or costs, for people.
        forward: What one rank sends in one layer's forward pass.
        backward: The same for the backward pass.
        memory: What one rank keeps besides inputs, results and gradients.
        multiple: What the sequence is padded to a multiple of.
        check: Raises UsageError for sizes that it cannot run.
        min_cp_size: Fewest ranks it makes sense with.
        max_cp_size: Most ranks, None where nothing limits them.
        options: Names of options that belong to it alone.
    """

    name: str
    summary: str
    pattern: str
    layout: str
    causal_layout: str
    forward_formula: str
    backward_formula: str
    limits: str
    forward: Callable[[AttentionShape], Traffic]
    backward: Callable[[AttentionShape], Traffic]
    memory: Callable[[AttentionShape], Memory]
    multiple: Callable[[AttentionShape], int] = needs.per_rank
    check: Callable[[AttentionShape], None] = needs.nothing
    min_cp_size: int = 2
    max_cp_size: int | None = None
    options: tuple[str, ...] = ()

    def layout_of(self, *, is_causal: bool) -> str:
        """Return the name of the layout of a run."""
        return self.causal_layout if is_causal else self.layout


SCHEMES: tuple[SchemeInfo, ...] = (
    SchemeInfo(
        name="single",
        summary="one rank computes everything: the baseline without communication",
        pattern="none",
        layout=CONTIGUOUS,
        causal_layout=CONTIGUOUS,
        forward_formula="0",
        backward_formula="0",
        limits="one rank",
        forward=traffic.none,
        backward=traffic.none,
        memory=memory.single,
        multiple=needs.one_token,
        min_cp_size=1,
        max_cp_size=1,
    ),
    SchemeInfo(
        name="all_gather",
        summary="every rank gathers all K and V, then computes its queries; backward gathers again",
        pattern="all_gather, reduce_scatter",
        layout=CONTIGUOUS,
        causal_layout=ZIGZAG,
        forward_formula="2(P-1)c",
        backward_formula="4(P-1)c",
        limits="holds all K and V; nothing hides the gather",
        forward=traffic.gather_forward,
        backward=traffic.gather_backward,
        memory=memory.all_gather,
        multiple=needs.per_half_chunk,
    ),
    SchemeInfo(
        name="all_gather_sliced",
        summary="all_gather one KV head at a time, the next one gathered while attention runs on this one",
        pattern="all_gather, reduce_scatter",
        layout=CONTIGUOUS,
        causal_layout=ZIGZAG,
        forward_formula="2(P-1)c",
        backward_formula="4(P-1)c",
        limits="the first gather and the last reduce-scatter stay exposed; one KV head hides nothing",
        forward=traffic.sliced_forward,
        backward=traffic.sliced_backward,
        memory=memory.all_gather_sliced,
        multiple=needs.per_half_chunk,
    ),
    SchemeInfo(
        name="ring",
        summary="K and V travel round a ring while each rank attends to the chunk it holds; double-buffered",
        pattern="send_recv",
        layout=CONTIGUOUS,
        causal_layout=CONTIGUOUS,
        forward_formula="2(P-1)c",
        backward_formula="2(P-1)c + 2Pc with gradients in fp32 (fp64 for fp64)",
        limits="with --causal rank r works on r+1 of P hops: unbalanced; see zigzag_ring, striped_ring",
        forward=traffic.ring_forward,
        backward=traffic.ring_backward,
        memory=memory.ring,
    ),
    SchemeInfo(
        name="zigzag_ring",
        summary="ring in which rank r holds chunks r and 2P-1-r, which balances causal attention",
        pattern="send_recv",
        layout=ZIGZAG,
        causal_layout=ZIGZAG,
        forward_formula="2(P-1)c",
        backward_formula="2(P-1)c + 2Pc with gradients in fp32 (fp64 for fp64)",
        limits="sequence divisible by 2P, else padded",
        forward=traffic.ring_forward,
        backward=traffic.ring_backward,
        memory=memory.ring,
        multiple=needs.per_half_chunk_always,
    ),
    SchemeInfo(
        name="striped_ring",
        summary="ring in which rank r holds tokens r, r+P, r+2P, ..., which balances causal attention",
        pattern="send_recv",
        layout=STRIPED,
        causal_layout=STRIPED,
        forward_formula="2(P-1)c",
        backward_formula="2(P-1)c + 2Pc with gradients in fp32 (fp64 for fp64)",
        limits="kernels that skip masked blocks gain less from its thin diagonals than from zigzag's squares",
        forward=traffic.ring_forward,
        backward=traffic.ring_backward,
        memory=memory.ring,
    ),
    SchemeInfo(
        name="te",
        summary="ring as in Transformer Engine (p2p): K and V in one message, two compute streams, sums at the end",
        pattern="send_recv; all_gather of one score with fp8 messages",
        layout=CONTIGUOUS,
        causal_layout=ZIGZAG,
        forward_formula="2(P-1)c; with --message-dtype fp8 2(P-1)(S/P) Hkv (D+4) + 4(P-1)",
        backward_formula="4(P-1)c; fp8 halves or quarters the part of K and V, never that of their gradients",
        limits="keeps P partial outputs; gradients are rounded to the data type at every hop",
        forward=traffic.te_forward,
        backward=traffic.te_backward,
        memory=memory.te,
        multiple=needs.per_half_chunk,
        options=("message_dtype", "fp8_score_limit"),
    ),
    SchemeInfo(
        name="ulysses",
        summary="all-to-alls turn a part of the sequence with all heads into all of it with a part of the heads",
        pattern="all_to_all",
        layout=CONTIGUOUS,
        causal_layout=CONTIGUOUS,
        forward_formula="(P-1)/P (2q + 2c), with KV heads replicated to P where there are fewer",
        backward_formula="as forward",
        limits="heads divisible by P, KV heads by P or P by them; attention needs each all-to-all where it is",
        forward=traffic.ulysses,
        backward=traffic.ulysses,
        memory=memory.ulysses,
        check=needs.split_heads,
    ),
    SchemeInfo(
        name="ulysses_chunked",
        summary="ulysses by groups of heads: all-to-alls of one group run while attention works on another",
        pattern="all_to_all",
        layout=CONTIGUOUS,
        causal_layout=CONTIGUOUS,
        forward_formula="(P-1)/P (2q + 2c), in 2 to 4 groups of heads",
        backward_formula="as forward",
        limits="as ulysses, with at least 2 heads per rank; the first and the last group stay exposed",
        forward=traffic.ulysses_chunked,
        backward=traffic.ulysses_chunked,
        memory=memory.ulysses_chunked,
        check=needs.chunk_heads,
    ),
    SchemeInfo(
        name="usp",
        summary="ulysses within groups of u ranks (--ulysses-size), a ring over the P/u groups",
        pattern="all_to_all, send_recv",
        layout=CONTIGUOUS,
        causal_layout=ZIGZAG,
        forward_formula="(u-1)/u (2q + 2c) + 2(P/u-1)c, with KV heads replicated to u where there are fewer",
        backward_formula="(u-1)/u (2q + 2c) + 2(P/u-1)c + 2(P/u)c with the ring's gradients in fp32",
        limits="u divides P and the heads; KV heads divisible by u, or u by them",
        forward=traffic.usp_forward,
        backward=traffic.usp_backward,
        memory=memory.usp,
        multiple=needs.per_rank_and_half_chunk,
        check=needs.split_some_heads,
        options=("ulysses_size",),
    ),
    SchemeInfo(
        name="tp",
        summary="tensor parallel: heads split, sequence whole, one all-reduce per pass: no context parallelism",
        pattern="all_reduce",
        layout=HEADS,
        causal_layout=HEADS,
        forward_formula="2(P-1)/P S Hq D e",
        backward_formula="as forward",
        limits="KV heads divisible by P; the all-reduce stands for the output projection's, exposed",
        forward=traffic.tensor_parallel,
        backward=traffic.tensor_parallel,
        memory=memory.tensor_parallel,
        multiple=needs.one_token,
        check=needs.whole_kv_heads,
    ),
)


def find_scheme(name: str) -> SchemeInfo:
    """Return the scheme called `name`.

    Raises:
        UsageError: There is none.
    """
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    names = ", ".join(scheme.name for scheme in SCHEMES)
    raise UsageError(f"--scheme {name}: no such scheme; choose one of {names}")


def names_with_option(option: str) -> tuple[str, ...]:
    """Return the schemes that an option of the run belongs to, none for options of all schemes."""
    return tuple(scheme.name for scheme in SCHEMES if option in scheme.options)
