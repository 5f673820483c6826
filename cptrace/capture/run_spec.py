"""What to run: the message from `cptrace run` to the process that runs it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, get_type_hints

from cptrace.errors import UsageError
from cptrace.schemes import AttentionShape, find_scheme

ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Bytes of one element, by name of the data type."""

CLOCKS: Final = ("paced", "real", "virtual")

_POSITIVE: Final = ("cp_size", "seq_len", "heads", "kv_heads", "head_dim", "layers", "steps")
_POSITIVE_REAL: Final = ("link_gbps", "compute_gflops", "memory_gbytes_per_s")
_NOT_NEGATIVE: Final = ("warmup", "seed", "link_latency_us")


@dataclass(frozen=True, slots=True)
class RunSpec:
    """All options of one run.

    Attributes:
        scheme: Name of an entry of `cptrace.schemes.SCHEMES`.
        cp_size: Ranks that share the sequence.
        seq_len: Tokens of the whole sequence.
        heads: Query heads.
        kv_heads: Key and value heads; fewer than `heads` is grouped-query attention.
        head_dim: Elements per head.
        layers: Attention layers in sequence.
        dtype: Data type of q, k, v and out: a key of `ELEMENT_BYTES`.
        causal: Whether a token sees only itself and earlier tokens.
        steps: Measured steps.
        warmup: Steps before them that are not measured.
        forward_only: Whether to leave out the backward pass.
        clock: Where timestamps come from, one of `CLOCKS`.
        link_gbps: Modelled bandwidth of a link in each direction, gigabits per second.
        link_latency_us: Modelled latency of a link, microseconds.
        compute_gflops: Modelled compute speed of a rank, 10^9 floating-point operations per second.
        memory_gbytes_per_s: Modelled memory bandwidth of a rank, 10^9 bytes per second.
        seed: Seed of the random inputs.
        check: Whether to compare results with the dense float64 reference.
    """

    scheme: str = "ring"
    cp_size: int = 4
    seq_len: int = 1024
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    layers: int = 1
    dtype: str = "fp32"
    causal: bool = False
    steps: int = 3
    warmup: int = 1
    forward_only: bool = False
    clock: str = "paced"
    link_gbps: float = 0.4
    link_latency_us: float = 20.0
    compute_gflops: float = 5.0
    memory_gbytes_per_s: float = 10.0
    seed: int = 0
    check: bool = True

    @property
    def shape(self) -> AttentionShape:
        """The sizes that traffic formulas take."""
        return AttentionShape(
            self.seq_len, self.cp_size, self.heads, self.kv_heads, self.head_dim, ELEMENT_BYTES[self.dtype]
        )

    @property
    def local_len(self) -> int:
        """Tokens that one rank holds."""
        return self.seq_len // self.cp_size

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes of a step, in order."""
        return ("forward",) if self.forward_only else ("forward", "backward")

    def validate(self) -> None:
        """Check that the options can be meant together.

        Raises:
            UsageError: They cannot; the message names the values that could.
        """
        self._validate_numbers()
        self._validate_choices()
        self._validate_heads()
        self._validate_sequence()

    def to_json(self) -> str:
        """Return the options as one JSON object."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Return the options that `to_json` wrote.

        Raises:
            UsageError: The text is not such an object.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"the run's options are not JSON: {error}") from error
        if not isinstance(values, dict):
            raise UsageError("the run's options must be one JSON object")
        _check_types(values)
        return cls(**values)

    def _validate_numbers(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be at least 1")
        for name in _POSITIVE_REAL:
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be greater than 0 and finite")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must not be negative")

    def _validate_choices(self) -> None:
        for name, choices in (("dtype", tuple(ELEMENT_BYTES)), ("clock", CLOCKS)):
            if getattr(self, name) not in choices:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: choose one of {', '.join(choices)}")
        scheme = find_scheme(self.scheme)
        if self.cp_size < scheme.min_cp_size:
            raise UsageError(
                f"--cp-size {self.cp_size}: scheme {self.scheme} needs at least {scheme.min_cp_size} ranks"
            )

    def _validate_heads(self) -> None:
        if self.heads % self.kv_heads:
            valid = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise UsageError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; choose one of {valid}"
            )

    def _validate_sequence(self) -> None:
        if not self.seq_len % self.cp_size:
            return
        below = self.seq_len // self.cp_size * self.cp_size
        lengths = " or ".join(str(n) for n in (below, below + self.cp_size) if n)
        fitting = [n for n in range(2, min(self.seq_len, 64) + 1) if self.seq_len % n == 0]
        sizes = ", ".join(map(str, fitting))
        other = f", or keep the length and use --cp-size {sizes}" if sizes else ""
        raise UsageError(
            f"--seq-len {self.seq_len} cannot be split evenly over --cp-size {self.cp_size}: "
            f"use --seq-len {lengths}{other}"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_types(values: dict[str, Any]) -> None:
    """Refuse unknown names and wrong types: a spec of another version fails with a message."""
    hints = get_type_hints(RunSpec)
    known = {item.name for item in fields(RunSpec)}
    if unknown := sorted(set(values) - known):
        raise UsageError(f"the run's options have unknown names: {', '.join(unknown)}")
    for name, value in values.items():
        accepted = (int, float) if hints[name] is float else (hints[name],)
        if not isinstance(value, accepted) or (isinstance(value, bool) and hints[name] is not bool):
            raise UsageError(f"the run's option {name} is {value!r}, not of type {hints[name].__name__}")
