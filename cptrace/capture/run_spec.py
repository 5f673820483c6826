"""What to run: the message from `cptrace run` to the process that runs it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, get_type_hints

from cptrace.errors import UsageError
from cptrace.faults import UNBALANCED, check_faults
from cptrace.impls import BUILTIN, check_impl
from cptrace.schemes import CONTIGUOUS, ELEMENT_BYTES, HEADS, AttentionShape, find_scheme, names_with_option
from cptrace.schemes.transformer import (
    ATTENTION,
    LLAMA,
    MODELS,
    BlockShape,
    default_ffn,
    require_even_head_dim,
    require_split,
)

VIRTUAL: Final = "virtual"
CLOCKS: Final = ("paced", "real", VIRTUAL)

CPU: Final = "cpu"
CUDA_DEVICE: Final = "cuda"
DEVICES: Final = (CPU, CUDA_DEVICE)
"""Devices of a run: `cpu` is the emulated one."""

FP8: Final = "fp8"
MESSAGE_DTYPES: Final = ("same", FP8)
"""Types in which K and V travel: the run's own, or 8-bit floating point with a scale per block."""

_POSITIVE: Final = (
    "cp_size",
    "seq_len",
    "heads",
    "kv_heads",
    "head_dim",
    "layers",
    "steps",
    "ulysses_size",
    "hidden",
    "ffn",
    "tp_size",
)
_POSITIVE_REAL: Final = ("link_gbps", "compute_gflops", "memory_gbytes_per_s", "fp8_score_limit")
_MOST_SIZES: Final = 64  # of ranks, in advice
_NOT_NEGATIVE: Final = ("warmup", "seed", "link_latency_us")
# Beyond these a run would last for days, its report would not fit, or its numbers would not fit into 64 bits.
_MOST: Final = {
    "cp_size": 4096,
    "seq_len": 2**31,
    "heads": 2**20,
    "kv_heads": 2**20,
    "head_dim": 2**16,
    "hidden": 2**20,
    "ffn": 2**24,
    "tp_size": 4096,
    "layers": 10_000,
    "steps": 10_000,
    "warmup": 10_000,
    "seed": 2**63 - 1,
    "link_latency_us": 1_000_000_000,
}
MODEL_OPTIONS: Final = ("hidden", "ffn", "tp_size")
_LEAST_REAL: Final = {"link_gbps": 1e-6, "compute_gflops": 1e-6, "memory_gbytes_per_s": 1e-6}


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
        layers: Attention layers, or blocks of the model, in sequence.
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
        ulysses_size: Ranks that split the heads, for schemes that split both heads and sequence.
        message_dtype: Type in which K and V travel, one of `MESSAGE_DTYPES`.
        fp8_score_limit: Largest score up to which messages may be fp8; a layer above it falls back to `dtype`.
        faults: What is broken on purpose: entries of `cptrace.faults.FAULTS`, as `NAME` or `NAME:RANK`.
        model: What is computed, one of `MODELS`.
        hidden: Elements of a token between blocks of the model.
        ffn: Columns of the model's feed-forward layer.
        tp_size: Ranks that share the weights of one part of the sequence, for the model.
        device: What it runs on, one of `DEVICES`; the clock and the modelled speeds are the emulated one's.
        impl: Whose code computes the scheme: the name of an entry of `cptrace.impls.IMPLS`.
    """

    scheme: str = "ring"
    cp_size: int = 4
    seq_len: int = 1024
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 32
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
    ulysses_size: int = 2
    message_dtype: str = MESSAGE_DTYPES[0]
    fp8_score_limit: float = 50.0
    faults: tuple[str, ...] = ()
    model: str = ATTENTION
    hidden: int = 256
    ffn: int = default_ffn(256)
    tp_size: int = 1
    device: str = CPU
    impl: str = BUILTIN

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share the sequence; a scheme that splits the heads in its place has one."""
        return 1 if self.layout == HEADS else self.cp_size

    @property
    def weight_ranks(self) -> int:
        """Ranks that share the weights of one part of the sequence."""
        return self.cp_size if self.layout == HEADS else self.tp_size

    @property
    def n_ranks(self) -> int:
        """All ranks."""
        return self.cp_size * self.tp_size

    @property
    def block(self) -> BlockShape:
        """The sizes of one rank's part of a block of the model."""
        n_ranks = self.weight_ranks
        heads, kv_heads = self.heads // n_ranks, self.kv_heads // n_ranks
        attention = replace(self.shape, cp_size=self.sequence_ranks, heads=heads, kv_heads=kv_heads)
        return BlockShape(attention, self.hidden, self.ffn, n_ranks)

    @property
    def shape(self) -> AttentionShape:
        """The sizes that traffic formulas take, with the padded length."""
        return replace(self._unpadded_shape, seq_len=self.padded_len)

    @property
    def padding_multiple(self) -> int:
        """What the sequence is padded to a multiple of."""
        return find_scheme(self.scheme).multiple(self._unpadded_shape)

    @property
    def padded_len(self) -> int:
        """Tokens of the whole sequence with the padding that the scheme's layout needs."""
        return -(-self.seq_len // self.padding_multiple) * self.padding_multiple

    @property
    def layout(self) -> str:
        """How tokens are placed on ranks."""
        if UNBALANCED in self.faults:
            return CONTIGUOUS
        return find_scheme(self.scheme).layout_of(is_causal=self.causal)

    @property
    def fits_without_padding(self) -> tuple[int, ...]:
        """The numbers of ranks that a run may have and over which the sequence divides without padding, up to 64."""
        sizes = range(1, min(self.seq_len, _MOST_SIZES) + 1)
        others = (replace(self, cp_size=n) for n in sizes)
        return tuple(it.cp_size for it in others if it._can_be_meant and it.padded_len == it.seq_len)

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
        self._validate_bounds()
        self._validate_choices()
        self._validate_heads()
        self._validate_model()
        self._validate_scheme()
        self._validate_device()
        # A GPU's ops take what they take, as on the machine's own clock.
        check_faults(replace(self, clock="real") if self.device == CUDA_DEVICE else self)

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
        lists: dict[str, Any] = {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
        return cls(**values | lists)

    def _validate_numbers(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be at least 1")
        for name in _POSITIVE_REAL:
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be greater than 0 and finite")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be at least 0 and finite")

    def _validate_bounds(self) -> None:
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be at most {most}")
        for name, least in _LEAST_REAL.items():
            if getattr(self, name) < least:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: must be at least {least:g}")

    def _validate_choices(self) -> None:
        choices_of = {
            "dtype": tuple(ELEMENT_BYTES),
            "clock": CLOCKS,
            "message_dtype": MESSAGE_DTYPES,
            "model": MODELS,
            "device": DEVICES,
        }
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: choose one of {', '.join(choices)}")

    def _validate_device(self) -> None:
        is_cuda = self.device == CUDA_DEVICE
        if is_cuda and self.clock == VIRTUAL:
            raise UsageError(
                "--device cuda --clock virtual: only the emulated device computes times; use --device cpu"
            )
        check_impl(self.impl, self.scheme, is_cuda=is_cuda, model=self.model)

    def _validate_heads(self) -> None:
        if self.heads % self.kv_heads:
            valid = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise UsageError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; choose one of {valid}"
            )

    def _validate_model(self) -> None:
        if self.model != LLAMA:
            self._refuse_options_of_models()
            return
        if self.dtype == "fp16":
            raise UsageError(
                f"--dtype fp16 --model {LLAMA}: its gradients need loss scaling; use --dtype bf16"
            )
        require_even_head_dim(self.head_dim)
        if self.layout == HEADS and self.tp_size > 1:
            raise UsageError(
                f"--tp-size {self.tp_size}: scheme {self.scheme} splits the weights over --cp-size ranks already; "
                f"use --scheme single --tp-size {self.n_ranks}, or --cp-size {self.n_ranks} alone"
            )
        names = ("heads", "kv_heads", "hidden", "ffn")
        option = "--cp-size" if self.layout == HEADS else "--tp-size"
        require_split({_option(name): getattr(self, name) for name in names}, self.weight_ranks, option)

    def _refuse_options_of_models(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in MODEL_OPTIONS and value != item.default:
                raise UsageError(
                    f"{_option(item.name)} {value}: --model {self.model} has no weights; "
                    f"it belongs to --model {LLAMA}"
                )

    def _validate_scheme(self) -> None:
        scheme = find_scheme(self.scheme)
        if self.cp_size < scheme.min_cp_size:
            raise UsageError(
                f"--cp-size {self.cp_size}: scheme {self.scheme} needs at least {scheme.min_cp_size} ranks"
            )
        if scheme.max_cp_size is not None and self.cp_size > scheme.max_cp_size:
            raise UsageError(
                f"--cp-size {self.cp_size}: scheme {self.scheme} runs on {scheme.max_cp_size}; "
                f"use --cp-size {scheme.max_cp_size}"
            )
        self._validate_own_options()
        try:
            scheme.check(self._unpadded_shape)
        except UsageError as error:
            if self.tp_size == 1:
                raise
            raise UsageError(f"of each of --tp-size {self.tp_size} ranks: {error}") from error

    def _validate_own_options(self) -> None:
        for item in fields(self):
            owners = names_with_option(item.name)
            value = getattr(self, item.name)
            if owners and self.scheme not in owners and value != item.default:
                raise UsageError(
                    f"{_option(item.name)} {value}: scheme {self.scheme} has no such option; it belongs to "
                    f"--scheme {', '.join(owners)}"
                )
        if self.message_dtype == FP8 and not self.warmup:
            raise UsageError(
                "--message-dtype fp8 --warmup 0: the scores that decide about fp8 are measured in the step before; "
                "use --warmup 1"
            )

    @property
    def _can_be_meant(self) -> bool:
        try:
            self.validate()
        except UsageError:
            return False
        return True

    @property
    def _unpadded_shape(self) -> AttentionShape:
        return AttentionShape(
            self.seq_len,
            self.cp_size,
            self.heads // self.tp_size,
            self.kv_heads // self.tp_size,
            self.head_dim,
            ELEMENT_BYTES[self.dtype],
            self.causal,
            self.ulysses_size,
            self.message_dtype == FP8,
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
        if not _is_of_type(value, hints[name]):
            raise UsageError(f"the run's option {name} is {value!r}, not of type {hints[name].__name__}")


def _is_of_type(value: object, hint: Any) -> bool:
    """Return whether a JSON value can stand for a field of that type."""
    if hint == tuple[str, ...]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    accepted = (int, float) if hint is float else (hint,)
    return isinstance(value, accepted) and (hint is bool or not isinstance(value, bool))
