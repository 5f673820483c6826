"""Named sets of run options: a preset sets defaults, and options that are given override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cptrace.schemes.transformer import LLAMA


@dataclass(frozen=True, slots=True)
class Preset:
    """A model's sizes.

    Attributes:
        name: What `--preset` takes.
        summary: What it is, in a few words.
        options: Values by the name of a `RunSpec` field.
    """

    name: str
    summary: str
    options: Mapping[str, int | str]


PRESETS: tuple[Preset, ...] = (
    Preset(
        "tiny",
        "2 layers of hidden 128, seconds on a laptop",
        MappingProxyType(
            {
                "model": LLAMA,
                "seq_len": 512,
                "hidden": 128,
                "heads": 8,
                "head_dim": 16,
                "ffn": 352,
                "layers": 2,
            }
        ),
    ),
    # Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, table 2.
    Preset(
        "llama-7b",
        "32 layers of hidden 4096, for machines that can hold it",
        MappingProxyType(
            {
                "model": LLAMA,
                "hidden": 4096,
                "heads": 32,
                "head_dim": 128,
                "ffn": 11008,
                "layers": 32,
            }
        ),
    ),
)


def find_preset(name: str) -> Preset:
    """Return the preset called `name`, one of `PRESETS`."""
    return next(preset for preset in PRESETS if preset.name == name)
