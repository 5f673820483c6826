"""The ops of a model around attention: each has a name, a label, a cost and a body that fills given tensors.

Costs: a matrix product of [m, k] and [k, n] counts 2mkn operations and its three operands; all others are bound
by memory traffic, every operand once.

Shapes: B batch, L local tokens, E hidden, H, G query and key/value heads of one rank, D head dim, F ffn of one
rank, Y = (H + 2G) D, Z = 2F; m, k, n sides of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from cptrace import labels
from instrumented import model_maths as maths
from instrumented.ops import Place, Tensors
from instrumented.runtime.api import Cost, Device, Stream

GEMM: Final = "cptrace_cpu::gemm"
RMS_NORM: Final = "cptrace_cpu::rms_norm"
RMS_NORM_BACKWARD: Final = "cptrace_cpu::rms_norm_backward"
ROPE: Final = "cptrace_cpu::rope"
ROPE_BACKWARD: Final = "cptrace_cpu::rope_backward"
SWIGLU: Final = "cptrace_cpu::swiglu"
SWIGLU_BACKWARD: Final = "cptrace_cpu::swiglu_backward"
ADD: Final = "cptrace_cpu::add"
SQUARED_ERROR: Final = "cptrace_cpu::squared_error"
GRAD_NORM: Final = "cptrace_cpu::grad_norm"


class LossShare(NamedTuple):
    """What of the loss is a rank's.

    Attributes:
        n_tokens: The rank's tokens that are not padding; they come first.
        n_elements: Elements of the whole sequence, of all ranks.
    """

    n_tokens: int
    n_elements: int


@dataclass(frozen=True, slots=True)
class ModelKernels:
    """Launches ops on one stream of a device."""

    device: Device
    stream: Stream

    def gemm(self, place: Place, target_mn: Tensor, left_mk: Tensor, right_kn: Tensor) -> None:
        """Launch a matrix product."""
        flops = 2 * left_mk.shape[0] * left_mk.shape[1] * right_kn.shape[1]
        self._launch(
            place,
            (labels.GEMM, GEMM),
            lambda: torch.mm(left_mk, right_kn, out=target_mn),
            (target_mn, left_mk, right_kn),
            flops,
        )

    def norm(self, place: Place, target_BLE: Tensor, x_BLE: Tensor, weight_E: Tensor) -> None:
        """Launch an RMSNorm."""
        touched = (target_BLE, x_BLE, weight_E)
        self._launch(
            place,
            (labels.NORM, RMS_NORM),
            lambda: target_BLE.copy_(maths.rms_norm(x_BLE, weight_E)),
            touched,
        )

    def norm_backward(
        self, place: Place, gradients: tuple[Tensor, Tensor], dy_BLE: Tensor, x_BLE: Tensor, weight_E: Tensor
    ) -> None:
        """Launch its backward pass: dx is added to what came round the norm, the weight's gradient is written."""
        dx_BLE, dweight_E = gradients

        def body() -> None:
            part_BLE, own_E = maths.rms_norm_backward(dy_BLE, x_BLE, weight_E)
            dx_BLE.add_(part_BLE)
            dweight_E.copy_(own_E)

        touched = (dx_BLE, dx_BLE, dweight_E, dy_BLE, x_BLE, weight_E)
        self._launch(place, (labels.NORM, RMS_NORM_BACKWARD), body, touched)

    def rope(self, place: Place, qkv: Tensors, fused_BLY: Tensor, table_2LC: Tensor) -> None:
        """Launch the cutting of a projection into (q, k, v) and the rotation of q and k."""

        def body() -> None:
            q, k, v = _heads_of(fused_BLY, qkv)
            for target, source in zip(
                qkv, (maths.rotate(q, table_2LC), maths.rotate(k, table_2LC), v), strict=True
            ):
                target.copy_(source)

        self._launch(place, (labels.ROPE, ROPE), body, (*qkv, fused_BLY, table_2LC))

    def rope_backward(self, place: Place, fused_BLY: Tensor, dqkv: Tensors, table_2LC: Tensor) -> None:
        """Launch the way back: (dq, dk, dv) into the gradient of the projection."""

        def body() -> None:
            dq, dk, dv = dqkv
            turned = (maths.rotate(t, table_2LC, is_backward=True) for t in (dq, dk))
            for target, source in zip(_heads_of(fused_BLY, dqkv), (*turned, dv), strict=True):
                target.copy_(source)

        self._launch(place, (labels.ROPE, ROPE_BACKWARD), body, (*dqkv, fused_BLY, table_2LC))

    def swiglu(self, place: Place, act_BLF: Tensor, gate_up_BLZ: Tensor) -> None:
        """Launch silu(gate) * up."""
        touched = (act_BLF, gate_up_BLZ)
        self._launch(
            place, (labels.ACTIVATION, SWIGLU), lambda: act_BLF.copy_(maths.swiglu(gate_up_BLZ)), touched
        )

    def swiglu_backward(
        self, place: Place, target_BLZ: Tensor, dact_BLF: Tensor, gate_up_BLZ: Tensor
    ) -> None:
        """Launch its backward pass."""
        touched = (target_BLZ, dact_BLF, gate_up_BLZ)
        self._launch(
            place,
            (labels.ACTIVATION, SWIGLU_BACKWARD),
            lambda: target_BLZ.copy_(maths.swiglu_backward(dact_BLF, gate_up_BLZ)),
            touched,
        )

    def add(self, place: Place, target_BLE: Tensor, x_BLE: Tensor, y_BLE: Tensor) -> None:
        """Launch the sum of a residual and what a half of a block puts out."""
        touched = (target_BLE, x_BLE, y_BLE)
        self._launch(
            place, (labels.ACTIVATION, ADD), lambda: torch.add(x_BLE, y_BLE, out=target_BLE), touched
        )

    def loss(
        self,
        place: Place,
        result: tuple[Tensor, Tensor],
        x_and_target: tuple[Tensor, Tensor],
        share: LossShare,
    ) -> None:
        """Launch these tokens' share of the loss and its gradient, into (loss, dx_BLE)."""
        loss, dx_BLE = result

        def body() -> None:
            x_BLE, target_BLE = (tensor[:, : share.n_tokens] for tensor in x_and_target)
            own_loss, gradient_BLE = maths.squared_error(x_BLE, target_BLE, share.n_elements)
            loss.copy_(own_loss)
            dx_BLE[:, : share.n_tokens].copy_(gradient_BLE)
            dx_BLE[:, share.n_tokens :].zero_()

        self._launch(place, (labels.LOSS, SQUARED_ERROR), body, (*result, *x_and_target))

    def grad_norm(self, place: Place, norm_1: Tensor, gradients: Tensor) -> None:
        """Launch the Euclidean norm of a layer's gradients, summed in fp64."""

        def body() -> None:
            norm_1.copy_(gradients.double().square().sum().sqrt())

        self._launch(place, (labels.GRAD_NORM, GRAD_NORM), body, (norm_1, gradients))

    def _launch(
        self,
        place: Place,
        names: tuple[str, str],
        body: Callable[[], object],
        touched: Tensors,
        flops: int = 0,
    ) -> None:
        """Launch a kernel that touches each of the given tensors once; `names` are its label's and its own."""
        label, name = names
        cost = Cost(flops, sum(tensor.nbytes for tensor in touched))
        with self.device.range(place.label(label), payload=place.hop, category=label):
            self.device.launch(self.stream, name, _without_result(body), cost=cost)


def _without_result(body: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        body()

    return run


def _heads_of(fused_BLY: Tensor, like: Tensors) -> Tensors:
    """Return the views of a projection that have the shapes of (q, k, v)."""
    columns = [tensor.shape[2] * tensor.shape[3] for tensor in like]
    return tuple(
        part.unflatten(-1, tensor.shape[2:])
        for part, tensor in zip(fused_BLY.split(columns, dim=-1), like, strict=True)
    )
