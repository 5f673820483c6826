"""A LLaMA-like stack of blocks around any scheme's attention, with its loss, backward pass and gradient all-reduce.

Everything but attention works on each token alone, so a rank needs only its own tokens for it. What ranks share is
told by two groups (see `mesh`):

- Ranks with the same weights and other tokens sum their weight gradients. Each layer's all-reduce is queued as
  soon as its last gradient is, on a stream and a communicator of its own, and runs beside the backward pass of the
  layers below; only the end of the step waits for it.
- Ranks with the same tokens and other weights sum what both halves of a block put out, and the gradients of what
  they take in. The next op needs each sum, so these all-reduces are exposed, but for the product of a weight
  gradient that runs beside them backward.

    block      x + out(attention(rope(qkv(norm(x)))))  then  x + down(swiglu(gate_up(norm(x))))

Shapes: B batch, L local tokens, E hidden, H, G query and key/value heads of one rank, D head dim, F ffn of one
rank, X = H D, Y = (H + 2G) D, Z = 2F; m is L without the batch, which is 1.
Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, section 2.2; Shoeybi et al.,
"Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cptrace import labels
from cptrace.capture.run_spec import RunSpec
from cptrace.labels import BACKWARD, FORWARD
from cptrace.schemes import HEADS
from instrumented.comm import Collectives
from instrumented.layout import Layout
from instrumented.mesh import GroupDevice, Mesh
from instrumented.model_maths import rope_table
from instrumented.model_ops import LossShare, ModelKernels
from instrumented.model_weights import BlockSizes, BlockWeights, make_tokens, make_weights
from instrumented.ops import Place
from instrumented.problem import BATCH, LayerState, Problem
from instrumented.runtime.api import Device
from instrumented.schemes import Implementation, find


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What one run of the model consists of.

    Attributes:
        mesh: How ranks share sequence and weights.
        sizes: Sizes of a whole block.
        problem: Sizes of one rank's attention.
        scheme: The scheme of attention within a group of ranks that share the sequence.
        layout: Which tokens each of them holds.
        n_layers: Blocks.
        n_steps: Steps, warm-up included.
        seed: Seed of weights, tokens and targets.
        with_backward: Whether there is a backward pass.
    """

    mesh: Mesh
    sizes: BlockSizes
    problem: Problem
    scheme: Implementation
    layout: Layout
    n_layers: int
    n_steps: int
    seed: int
    with_backward: bool

    @classmethod
    def of(cls, spec: RunSpec) -> ModelPlan:
        """Return the plan of a run; a scheme that splits the heads becomes a mesh that does, with all tokens here."""
        mesh, sizes = Mesh.of(spec), BlockSizes.of(spec)
        own = sizes.of_rank(mesh.tp_size)
        problem = replace(
            Problem.of(spec),
            cp_size=mesh.cp_size,
            local_len=spec.padded_len // mesh.cp_size,
            heads=own.heads,
            kv_heads=own.kv_heads,
        )
        scheme = find("single" if spec.layout == HEADS else spec.scheme)
        layout = scheme.placement(problem)
        assert isinstance(layout, Layout)  # all others split the sequence
        n_steps = spec.warmup + spec.steps
        return cls(
            mesh, sizes, problem, scheme, layout, spec.layers, n_steps, spec.seed, not spec.forward_only
        )

    @property
    def whole_shape(self) -> tuple[int, int, int]:
        """Shape of the whole sequence between blocks, BSE."""
        return BATCH, self.problem.seq_len, self.sizes.hidden

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return the whole input and target, BSE."""
        return make_tokens(self.whole_shape, self.seed, self.n_layers, self.problem.data_type)

    def weights(self, layer: int) -> BlockWeights:
        """Return the whole weights of a block."""
        return make_weights(self.sizes, self.seed, layer, self.problem.data_type)


@dataclass(frozen=True, slots=True)
class Block:
    """One block on one rank: weights, their gradients, and what its forward pass leaves for its backward pass.

    Attributes:
        weights: This rank's.
        gradients_flat: Their gradients, one after another, filled up with zeros so that the group divides them.
        gradients: Views of it.
        attention: q, k, v, out and their gradients.
        normed_BLE: Inputs of the two halves after their norms.
        middle_BLE: What the first half puts out, residual included.
        gate_up_BLZ: The feed-forward layer's two projections.
        act_BLF: Their product.
        out_BLE: What the block puts out.
    """

    weights: BlockWeights
    gradients_flat: Tensor
    gradients: BlockWeights
    attention: LayerState
    normed_BLE: tuple[Tensor, Tensor]
    middle_BLE: Tensor
    gate_up_BLZ: Tensor
    act_BLF: Tensor
    out_BLE: Tensor


class LlamaModel:
    """The model of one rank."""

    def __init__(self, device: Device, plan: ModelPlan) -> None:
        """Create streams, communicators and buffers; every rank must do so at the same time."""
        self._device, self._plan = device, plan
        self._compute = device.stream()
        self._kernels = ModelKernels(device, self._compute)
        mesh, rank = plan.mesh, device.rank
        sequence, weights = mesh.sequence_groups(rank), mesh.weight_groups(rank)
        # A group of one has nothing to sum, and then no stream for it either.
        has_gradients = plan.with_backward and mesh.cp_size > 1
        self._grads = Collectives(device, labels.GRADS, sequence) if has_gradients else None
        self._sums = Collectives(device, "hidden", weights) if mesh.tp_size > 1 else None
        self.blocks = [self._make_block(layer) for layer in range(plan.n_layers)]
        states = [block.attention for block in self.blocks]
        self._attention = plan.scheme.make(GroupDevice(device, sequence, self._compute), plan.problem, states)
        self.monitors = self._attention.monitors
        self._make_buffers()

    def _make_block(self, layer: int) -> Block:
        plan, mesh = self._plan, self._plan.mesh
        sizes = plan.sizes.of_rank(mesh.tp_size)
        n_flat = -(-sizes.n_weights // mesh.cp_size) * mesh.cp_size
        weights_flat, gradients_flat = self._empty(n_flat), self._empty(n_flat)
        weights = BlockWeights.views(weights_flat, sizes)
        own = plan.weights(layer).of_rank(plan.sizes, mesh.tp_size, mesh.tp_rank(self._device.rank))
        for target, source in zip(weights, own, strict=True):
            target.copy_(source)
        gradients_flat.zero_()
        return Block(
            weights,
            gradients_flat,
            BlockWeights.views(gradients_flat, sizes),
            self._make_attention_state(),
            (self._tokens(sizes.hidden), self._tokens(sizes.hidden)),
            self._tokens(sizes.hidden),
            self._tokens(2 * sizes.ffn),
            self._tokens(sizes.ffn),
            self._tokens(sizes.hidden),
        )

    def _make_attention_state(self) -> LayerState:
        q_shape, kv_shape = self._plan.problem.q_shape, self._plan.problem.kv_shape
        shapes = (q_shape, kv_shape, kv_shape, q_shape, q_shape, q_shape, kv_shape, kv_shape)
        return LayerState(*(self._empty(*shape) for shape in shapes))

    def _make_buffers(self) -> None:
        """Create what all blocks share, place the input, and count the steps."""
        plan, sizes = self._plan, self._plan.sizes.of_rank(self._plan.mesh.tp_size)
        cp_rank = plan.mesh.cp_rank(self._device.rank)
        self._input_BLE, self._target_BLE = self._tokens(sizes.hidden), self._tokens(sizes.hidden)
        for target, whole in zip((self._input_BLE, self._target_BLE), plan.tokens(), strict=True):
            target.copy_(plan.layout.shard(whole, cp_rank))
        positions_L, sum_type = plan.layout.position_ids(cp_rank), plan.problem.sum_type
        table_2LC = rope_table(positions_L, sizes.head_dim, sum_type)
        self._table_2LC = self._device.empty(table_2LC.shape, sum_type)
        self._table_2LC.copy_(table_2LC)
        self._qkv_BLY, self._dgate_up_BLZ = self._tokens(sum(sizes.qkv_columns)), self._tokens(2 * sizes.ffn)
        self._dact_BLF = self._tokens(sizes.ffn)
        self._part_BLE, self._dx_BLE = self._tokens(sizes.hidden), self._tokens(sizes.hidden)
        n_elements = plan.problem.seq_len * sizes.hidden
        self._share = LossShare(plan.layout.n_tokens(cp_rank), n_elements)
        self._step = 0
        self.losses = self._device.empty((plan.n_steps,), sum_type)
        self.grad_norms = self._device.empty((plan.n_steps, plan.n_layers), torch.float64)

    def forward(self, layer: int) -> None:
        """Queue one block's forward pass, and after the last block the loss."""
        block, place, kernels = self.blocks[layer], Place(FORWARD, layer, 0), self._kernels
        x_BLE, weights, state = self._input_of(layer), block.weights, block.attention
        kernels.norm(place, block.normed_BLE[0], x_BLE, weights.norms_2E[0])
        kernels.gemm(place, _rows(self._qkv_BLY), _rows(block.normed_BLE[0]), weights.qkv_EY)
        kernels.rope(place, (state.q_BLHD, state.k_BLGD, state.v_BLGD), self._qkv_BLY, self._table_2LC)
        self._attention.forward(layer)
        kernels.gemm(place, _rows(self._part_BLE), _heads(state.out_BLHD), weights.out_XE)
        self._sum(place, labels.ATTENTION_OUT)
        kernels.add(place, block.middle_BLE, x_BLE, self._part_BLE)
        kernels.norm(place, block.normed_BLE[1], block.middle_BLE, weights.norms_2E[1])
        kernels.gemm(place, _rows(block.gate_up_BLZ), _rows(block.normed_BLE[1]), weights.gate_up_EZ)
        kernels.swiglu(place, block.act_BLF, block.gate_up_BLZ)
        kernels.gemm(place, _rows(self._part_BLE), _rows(block.act_BLF), weights.down_FE)
        self._sum(place, labels.FFN_OUT)
        kernels.add(place, block.out_BLE, block.middle_BLE, self._part_BLE)
        if layer + 1 == len(self.blocks):
            result = (self.losses[self._step], self._dx_BLE)
            kernels.loss(place, result, (block.out_BLE, self._target_BLE), self._share)

    def backward(self, layer: int) -> None:
        """Queue one block's backward pass and the all-reduce of its weight gradients."""
        place = Place(BACKWARD, layer, 0)
        self._feed_forward_backward(place)
        self._attention_backward(place)
        if self._grads is not None:
            self._grads.after(self._compute)
            self._grads.all_reduce(place, labels.GRADS, self.blocks[layer].gradients_flat)

    def finish_step(self) -> None:
        """Queue what ends a step: the wait for all gradients, and their norms."""
        if self._plan.with_backward:
            if self._grads is not None:
                self._grads.before(self._compute)
            for layer, block in enumerate(self.blocks):
                norm = self.grad_norms[self._step, layer]
                self._kernels.grad_norm(Place(BACKWARD, layer, 0), norm, block.gradients_flat)
        self._step += 1

    def _feed_forward_backward(self, place: Place) -> None:
        """Queue the backward pass of a block's second half: `dx` becomes the gradient of its middle."""
        block, kernels = self.blocks[place.layer], self._kernels
        weights, gradients, dx_mE = block.weights, block.gradients, _rows(self._dx_BLE)
        kernels.gemm(place, _rows(self._dact_BLF), dx_mE, weights.down_FE.T)
        kernels.gemm(place, gradients.down_FE, _rows(block.act_BLF).T, dx_mE)
        kernels.swiglu_backward(place, self._dgate_up_BLZ, self._dact_BLF, block.gate_up_BLZ)
        dgate_up_mZ = _rows(self._dgate_up_BLZ)
        kernels.gemm(place, _rows(self._part_BLE), dgate_up_mZ, weights.gate_up_EZ.T)
        self._start_sum(place, labels.FFN_DX)
        kernels.gemm(place, gradients.gate_up_EZ, _rows(block.normed_BLE[1]).T, dgate_up_mZ)
        self._finish_sum()
        both = (self._dx_BLE, gradients.norms_2E[1])
        kernels.norm_backward(place, both, self._part_BLE, block.middle_BLE, weights.norms_2E[1])

    def _attention_backward(self, place: Place) -> None:
        """Queue the backward pass of a block's first half: `dx` becomes the gradient of its input."""
        block, kernels = self.blocks[place.layer], self._kernels
        weights, gradients, state = block.weights, block.gradients, block.attention
        dx_mE = _rows(self._dx_BLE)
        kernels.gemm(place, _heads(state.dout_BLHD), dx_mE, weights.out_XE.T)
        kernels.gemm(place, gradients.out_XE, _heads(state.out_BLHD).T, dx_mE)
        self._attention.backward(place.layer)
        dqkv = (state.dq_BLHD, state.dk_BLGD, state.dv_BLGD)
        kernels.rope_backward(place, self._qkv_BLY, dqkv, self._table_2LC)
        kernels.gemm(place, _rows(self._part_BLE), _rows(self._qkv_BLY), weights.qkv_EY.T)
        self._start_sum(place, labels.ATTENTION_DX)
        kernels.gemm(place, gradients.qkv_EY, _rows(block.normed_BLE[0]).T, _rows(self._qkv_BLY))
        self._finish_sum()
        both = (self._dx_BLE, gradients.norms_2E[0])
        x_BLE = self._input_of(place.layer)
        kernels.norm_backward(place, both, self._part_BLE, x_BLE, weights.norms_2E[0])

    def _input_of(self, layer: int) -> Tensor:
        return self.blocks[layer - 1].out_BLE if layer else self._input_BLE

    def _sum(self, place: Place, name: str) -> None:
        """Sum `part` over the ranks that share the weights, before anything else on the compute stream."""
        self._start_sum(place, name)
        self._finish_sum()

    def _start_sum(self, place: Place, name: str) -> None:
        if self._sums is not None:
            self._sums.after(self._compute)
            self._sums.all_reduce(place, name, self._part_BLE)

    def _finish_sum(self) -> None:
        if self._sums is not None:
            self._sums.before(self._compute)

    def _tokens(self, n_columns: int) -> Tensor:
        return self._empty(BATCH, self._plan.problem.local_len, n_columns)

    def _empty(self, *shape: int) -> Tensor:
        return self._device.empty(shape, self._plan.problem.data_type)


def _rows(tensor_BLX: Tensor) -> Tensor:
    """Return a tensor as a matrix with a row per token."""
    return tensor_BLX.flatten(0, 1)


def _heads(tensor_BLHD: Tensor) -> Tensor:
    """Return a tensor as a matrix with a row per token, its heads side by side."""
    return tensor_BLHD.flatten(2, 3).flatten(0, 1)
