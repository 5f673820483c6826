"""Whether a run of the model computed it: results against float64, the loss, and gradients that ranks agree on.

A gradient that was not summed over the ranks that share the sequence leaves each of them with its own, and the
models drift apart without any error. The norm after the all-reduce shows it at once: it must be the same number
on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cptrace.capture.run_spec import RunSpec
from cptrace.faults import has_undefined_results
from cptrace.schemes.transformer import LLAMA
from instrumented.checks import MAX_ERROR_RATIO, MAX_FLOOR_ULPS, ParityRow, Yardstick
from instrumented.layout import Layout
from instrumented.mesh import Mesh
from instrumented.model import ModelPlan
from instrumented.model_oracle import one_process, reference
from instrumented.model_weights import WEIGHT_NAMES, BlockWeights, part_of

HIDDEN: Final = "hidden"


class ModelFigures(NamedTuple):
    """What a rank has to show for each step, warm-up included.

    Attributes:
        losses: Its tokens' share of the loss, by step.
        grad_norms: The norm of its gradients after their all-reduce, by step and layer; empty without a backward pass.
    """

    losses: list[float]
    grad_norms: list[list[float]]


class LossLimit(NamedTuple):
    """What a rank's share of the loss should be, and how far off it may be."""

    exact: float
    limit: float


@dataclass(frozen=True, slots=True)
class _OnMesh:
    """The placement of tokens on all ranks: those that share weights hold the same."""

    layout: Layout
    mesh: Mesh

    @property
    def name(self) -> str:
        return self.layout.name

    def n_tokens(self, rank: int) -> int:
        return self.layout.n_tokens(self.mesh.cp_rank(rank))

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        return self.layout.shard(whole, self.mesh.cp_rank(rank))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return self.layout.unshard(list(shards)[:: self.mesh.tp_size])


class ModelCheck:
    """Compares a run's results with references that it computes."""

    def __init__(self, plan: ModelPlan, fp8_layers: Collection[int], place: torch.device) -> None:
        """Compute the references.

        Args:
            plan: What ran.
            fp8_layers: Blocks whose keys and values travelled as fp8.
            place: Device that it ran on.
        """
        self._plan, self._placement = plan, _OnMesh(plan.layout, plan.mesh)
        self._exact, self._measured = reference(plan), one_process(plan, fp8_layers, place)

    def rows(self, layer: int, outs: Sequence[Tensor], gradients: Sequence[BlockWeights]) -> list[ParityRow]:
        """Return the rows of one block.

        Args:
            layer: Which block.
            outs: What each rank's block put out, in rank order.
            gradients: Each rank's gradients after their all-reduce; none for a forward pass alone.
        """
        hidden = Yardstick.of(layer, HIDDEN, self._exact.out_BSE[layer], self._measured.out_BSE[layer])
        rows = hidden.token_rows(self._placement, outs)
        if not gradients:
            return rows
        exact, measured = self._exact.gradients[layer], self._measured.gradients[layer]
        for number, name in enumerate(WEIGHT_NAMES):
            yardstick = Yardstick.of(layer, f"d{name}", exact[number], measured[number])
            rows += [
                yardstick.row(rank, of_rank[number], partial(self._cut, name, rank))
                for rank, of_rank in enumerate(gradients)
            ]
        return rows

    def loss_limits(self) -> list[LossLimit]:
        """Return what each rank's share of the loss may be.

        Off by twice what one process is, and a sum is always allowed as much rounding as one value's: a few units
        in the last place of the type it is summed in, or one of the type of what is summed.
        """
        problem = self._plan.problem
        sum_ulp, ulp = torch.finfo(problem.sum_type).eps, torch.finfo(problem.data_type).eps
        limits = []
        for rank in range(self._plan.mesh.cp_size * self._plan.mesh.tp_size):
            exact, measured = (
                float(self._placement.shard(results.loss_BS, rank).double().sum())
                for results in (self._exact, self._measured)
            )
            floor = max(MAX_FLOOR_ULPS * sum_ulp, ulp) * exact
            limits.append(LossLimit(exact, max(MAX_ERROR_RATIO * abs(measured - exact), floor)))
        return limits

    def _cut(self, name: str, rank: int, whole: Tensor) -> Tensor:
        mesh = self._plan.mesh
        return part_of(name, whole, self._plan.sizes, mesh.tp_size, mesh.tp_rank(rank))


def checks_json(
    spec: RunSpec,
    figures: Sequence[ModelFigures | None],
    rows: Sequence[ParityRow],
    limits: Sequence[LossLimit],
) -> dict[str, Any]:
    """Return the records of both checks, for any run.

    Args:
        spec: What ran.
        figures: What each rank has to show; None for attention alone.
        rows: All ranks' comparisons with the reference.
        limits: What each rank's share of the loss may be; none where it was not compared.
    """
    shown, mesh = [rank for rank in figures if rank is not None], Mesh.of(spec)
    if not shown:
        return {
            "grad_norm": _not_applicable(f"attention alone has no weights; --model {LLAMA} has"),
            "loss": _not_applicable(f"attention alone has no loss; --model {LLAMA} has"),
        }
    if has_undefined_results(spec.faults):
        undefined = _not_applicable("a fault of this run makes its results undefined")
        return {"grad_norm": undefined, "loss": undefined}
    grad_norm = _not_applicable("a forward pass alone has no gradients")
    if mesh.cp_size == 1:
        grad_norm = _not_applicable("no ranks share the sequence, so none have the same weights")
    elif not spec.forward_only:
        grad_norm = grad_norm_json(mesh, [rank.grad_norms[spec.warmup :] for rank in shown])
    loss = _not_applicable("it was not computed on one device (--no-check)")
    if limits:
        losses = [rank.losses[spec.warmup :] for rank in shown]
        loss = loss_json(mesh, losses, limits, first_bad_layers(rows))
    return {"grad_norm": grad_norm, "loss": loss}


def _not_applicable(reason: str) -> dict[str, Any]:
    return {"passed": None, "not_applicable": reason}


def grad_norm_json(mesh: Mesh, norms: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return whether all ranks of a group have the same gradient norms.

    Args:
        mesh: Which ranks belong together.
        norms: By rank, measured step and layer.
    """
    failures = list(_norm_failures(mesh, norms))
    return {
        "passed": not failures,
        "n_compared": sum(len(layers) for steps in norms for layers in steps),
        "largest_norm": _finite(max(norm for steps in norms for layers in steps for norm in layers)),
        "failures": failures,
    }


def _norm_failures(mesh: Mesh, norms: Sequence[Sequence[Sequence[float]]]) -> Iterator[dict[str, Any]]:
    """Yield the ranks whose norm is not that of most of their group, or not finite."""
    for step in range(len(norms[0])):
        for layer in range(len(norms[0][step])):
            for tp_rank in range(mesh.tp_size):
                ranks = mesh.sequence_groups(tp_rank).ranks
                values = [norms[rank][step][layer] for rank in ranks]
                (expected, _), *_ = Counter(values).most_common(1)
                for rank, value in zip(ranks, values, strict=True):
                    if value != expected or _finite(value) is None:
                        place = {"rank": rank, "layer": layer, "step": step}
                        yield {**place, "norm": _finite(value), "expected": _finite(expected)}


def loss_json(
    mesh: Mesh,
    losses: Sequence[Sequence[float]],
    limits: Sequence[LossLimit],
    first_bad_layers: Mapping[int, int],
) -> dict[str, Any]:
    """Return whether every step's loss is that of one device.

    Args:
        mesh: How ranks share the sequence.
        losses: Each rank's share, by rank and measured step.
        limits: What each rank's share may be.
        first_bad_layers: The first layer whose output is off, by rank, where one is.
    """
    sharers = range(0, len(losses), mesh.tp_size)  # others hold the same tokens once more
    exact = sum(limits[rank].exact for rank in sharers)
    totals = [sum(losses[rank][step] for rank in sharers) for step in range(len(losses[0]))]
    failures = [
        {
            "rank": rank,
            "layer": first_bad_layers.get(rank),
            "step": step,
            "loss": _finite(loss),
            "expected": limits[rank].exact,
            "limit": limits[rank].limit,
        }
        for rank, steps in enumerate(losses)
        for step, loss in enumerate(steps)
        if not abs(loss - limits[rank].exact) <= limits[rank].limit
    ]
    return {
        "passed": not failures,
        "losses": [_finite(total) for total in totals],
        "single_device_loss": exact,
        "limit": sum(limits[rank].limit for rank in sharers),
        "failures": failures,
    }


def first_bad_layers(rows: Sequence[ParityRow]) -> dict[int, int]:
    """Return the first layer of each rank whose output failed, where one did."""
    bad = [(row.layer, row.rank) for row in rows if row.tensor == HIDDEN and not row.has_passed]
    return {rank: layer for layer, rank in sorted(bad, reverse=True)}


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
