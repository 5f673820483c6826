"""What a run computes, to the code that runs it: attention alone, or the model around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cptrace.capture.run_spec import RunSpec
from cptrace.schemes.transformer import LLAMA
from instrumented.checks import ParityCheck, ParityRow
from instrumented.impls import implementation_of
from instrumented.model import LlamaModel, ModelPlan
from instrumented.model_checks import LossLimit, ModelCheck, ModelFigures
from instrumented.model_weights import BlockWeights
from instrumented.oracle import TENSOR_NAMES
from instrumented.problem import LayerState, Problem, make_inputs
from instrumented.runtime.api import Device
from instrumented.runtime.gloo import gather_shards
from instrumented.schemes import Monitors

_N_FORWARD_RESULTS: Final = 1

Say = Callable[[str], None]
"""Takes a line about what happens now."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run compares with the float64 reference: all ranks' results on rank 0, nothing elsewhere.

    Attributes:
        parity: A row per tensor.
        loss_limits: What each rank's share of the loss may be; empty without a loss.
    """

    parity: Sequence[ParityRow] = ()
    loss_limits: Sequence[LossLimit] = ()


class Workload(Protocol):
    """What a rank computes: queues passes of layers on its device."""

    monitors: Monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass."""

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass."""

    def finish_step(self) -> None:
        """Queue what ends a step."""

    def figures(self) -> ModelFigures | None:
        """Return what the rank has to show for each step; None for attention, which has neither loss nor weights."""

    def compare(self, say: Say) -> Comparison:
        """Compare the last step's results with float64; every rank must take part."""


def make_workload(spec: RunSpec, device: Device) -> Workload:
    """Return what a run computes, placed on one rank's device; every rank must do so at the same time."""
    if spec.model == LLAMA:
        return ModelWorkload(device, ModelPlan.of(spec))
    return AttentionWorkload(device, spec)


class AttentionWorkload:
    """Layers of attention on random q, k and v, each on its own."""

    def __init__(self, device: Device, spec: RunSpec) -> None:
        """Place the inputs and make the scheme."""
        problem, scheme = Problem.of(spec), implementation_of(spec)
        layout = scheme.placement(problem)
        self._n_tensors = _N_FORWARD_RESULTS if spec.forward_only else len(TENSOR_NAMES)
        self._layers = [
            LayerState.allocate(device, make_inputs(problem, spec.seed, layer).shard(layout, device.rank))
            for layer in range(spec.layers)
        ]
        place, has_gradients = self._layers[0].q_BLHD.device, not spec.forward_only
        self._check = ParityCheck(problem, layout, spec.seed, with_backward=has_gradients, place=place)
        self._attention = scheme.make(device, problem, self._layers)
        self.monitors = self._attention.monitors

    def forward(self, layer: int) -> None:
        """Queue one layer's forward pass."""
        self._attention.forward(layer)

    def backward(self, layer: int) -> None:
        """Queue one layer's backward pass."""
        self._attention.backward(layer)

    def finish_step(self) -> None:
        """Queue nothing."""

    def figures(self) -> None:
        """Return None: there is no loss and there are no weights."""

    def compare(self, say: Say) -> Comparison:
        """Compare each layer's output and gradients with dense attention."""
        rows: list[ParityRow] = []
        for layer, state in enumerate(self._layers):
            tensors = (state.out_BLHD, state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)[: self._n_tensors]
            shards = {name: gather_shards(t) for name, t in zip(TENSOR_NAMES, tensors, strict=False)}
            whole = {name: parts for name, parts in shards.items() if parts is not None}
            if whole:
                say(f"checking layer {layer + 1} of {len(self._layers)} against float64")
                rows += self._check.rows(layer, whole, has_fp8_keys=self.monitors.sends_fp8(layer))
        return Comparison(rows)


@dataclass(slots=True)
class ModelWorkload:
    """The model of one rank, and its comparison with the whole model on one device."""

    device: Device
    plan: ModelPlan
    monitors: Monitors = field(init=False)
    _model: LlamaModel = field(init=False)

    def __post_init__(self) -> None:
        """Place the weights and make the scheme."""
        self._model = LlamaModel(self.device, self.plan)
        self.monitors = self._model.monitors

    def forward(self, layer: int) -> None:
        """Queue one block's forward pass."""
        self._model.forward(layer)

    def backward(self, layer: int) -> None:
        """Queue one block's backward pass."""
        self._model.backward(layer)

    def finish_step(self) -> None:
        """Queue the wait for gradients, and their norms."""
        self._model.finish_step()

    def figures(self) -> ModelFigures:
        """Return losses and gradient norms."""
        norms = self._model.grad_norms.tolist() if self.plan.with_backward else []
        return ModelFigures(self._model.losses.tolist(), norms)

    def compare(self, say: Say) -> Comparison:
        """Compare each block's output, and the gradients of its weights, with the whole model's."""
        check = None
        if self.device.rank == 0:
            say("computing the reference on one device, in float64")
            n_layers = self.plan.n_layers
            fp8_layers = [n for n in range(n_layers) if self.monitors.sends_fp8(n)]
            check = ModelCheck(self.plan, fp8_layers, self._model.losses.device)
        rows: list[ParityRow] = []
        for layer, block in enumerate(self._model.blocks):
            outs = gather_shards(block.out_BLE)
            flats = gather_shards(block.gradients_flat) if self.plan.with_backward else []
            if check is not None and outs is not None and flats is not None:
                sizes = self.plan.sizes.of_rank(self.plan.mesh.tp_size)
                rows += check.rows(layer, outs, [BlockWeights.views(flat, sizes) for flat in flats])
        return Comparison(rows, check.loss_limits() if check is not None else ())
