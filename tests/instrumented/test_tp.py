"""Context parallelism times tensor parallelism: who is in which group, who holds which weights, who sends to whom."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from cptrace import labels
from cptrace.labels import parse_label
from instrumented.comm import Group
from instrumented.mesh import GroupDevice, Mesh
from instrumented.model_weights import BlockSizes, BlockWeights, make_weights
from instrumented.runtime.api import Message
from tests.instrumented.conftest import ModelRun
from tests.instrumented.model_cases import TP_CASES
from tests.instrumented.tracing_device import TracingDevice

ON_A_MESH = [name for name, case in TP_CASES.items() if case.get("cp_size", 2) == 2]


def test_the_sequence_is_cut_first_and_the_weights_second() -> None:
    """tp_rank   0  1  2
    cp_rank 0    0  1  2
    cp_rank 1    3  4  5
    """
    mesh = Mesh(cp_size=2, tp_size=3)
    assert [(mesh.cp_rank(rank), mesh.tp_rank(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
    ]  # fmt: skip
    assert mesh.sequence_groups(4).partition == ((0, 3), (1, 4), (2, 5))
    assert mesh.weight_groups(4).partition == ((0, 1, 2), (3, 4, 5))
    assert (mesh.sequence_groups(4).ranks, mesh.sequence_groups(4).index) == ((1, 4), 1)
    assert (mesh.weight_groups(4).ranks, mesh.weight_groups(4).index) == ((3, 4, 5), 1)


@pytest.mark.parametrize("name", ON_A_MESH)
def test_attention_stays_within_the_ranks_of_the_same_weights(
    model_runs: dict[str, ModelRun], name: str
) -> None:
    """Labels name ranks of the whole run: 0 and 2 share the sequence, 0 and 1 the weights."""
    for number, rank in enumerate(model_runs[name].ranks):
        peers = Counter[tuple[str, str]]()
        for label in map(parse_label, rank["ranges"]):
            if label is not None and label.name in labels.COMMUNICATION:
                is_sum = label.fields["tensor"] in labels.MODEL_TENSORS[1:]
                peers["weights" if is_sum else "sequence", label.fields["peers"]] += 1
        assert set(peers) == {("sequence", str((number + 2) % 4)), ("weights", str(number ^ 1))}


@pytest.mark.parametrize("name", ON_A_MESH)
def test_ranks_that_share_weights_have_different_gradients_and_the_same_loss(
    model_runs: dict[str, ModelRun], name: str
) -> None:
    figures = [rank["figures"] for rank in model_runs[name].ranks]
    assert figures[0].losses == figures[1].losses != figures[2].losses == figures[3].losses
    assert figures[0].grad_norms == figures[2].grad_norms != figures[1].grad_norms == figures[3].grad_norms


def test_the_scheme_without_context_parallelism_is_a_mesh_of_weights_alone(
    model_runs: dict[str, ModelRun],
) -> None:
    """`--scheme tp --cp-size 4` and `--scheme single --tp-size 4` do the same."""
    one, other = model_runs["tp-scheme"], model_runs["tp-alone"]
    assert [rank["timed"] for rank in one.ranks] == [rank["timed"] for rank in other.ranks]
    assert [rank["ranges"] for rank in one.ranks] == [rank["ranges"] for rank in other.ranks]


SIZES = BlockSizes(hidden=6, heads=4, kv_heads=2, head_dim=2, ffn=4)


def test_parts_of_all_ranks_are_the_whole_weights() -> None:
    """A product of a column-parallel and a row-parallel weight is the sum of the ranks' products."""
    whole = make_weights(SIZES, seed=0, layer=0, data_type=torch.float64)
    parts = [whole.of_rank(SIZES, 2, rank) for rank in range(2)]
    sizes = SIZES.of_rank(2)
    assert all([tuple(w.shape) for w in part] == list(sizes.shapes) for part in parts)
    for number, counts in ((1, SIZES.qkv_columns), (3, (SIZES.ffn, SIZES.ffn))):
        own_counts = [count // 2 for count in counts]
        split = [part[number].split(own_counts, dim=1) for part in parts]
        rejoined = [piece for pair in zip(*split, strict=True) for piece in pair]
        assert torch.equal(torch.cat(rejoined, dim=1), whole[number])
    for number in (2, 4):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])
    assert all(torch.equal(part.norms_2E, whole.norms_2E) for part in parts)


def test_flat_gradients_are_cut_where_the_weights_are() -> None:
    flat = torch.arange(SIZES.n_weights + 3.0)
    views = BlockWeights.views(flat, SIZES)
    assert torch.equal(torch.cat([view.reshape(-1) for view in views]), flat[: SIZES.n_weights])
    views.down_FE[-1, -1] = -1
    assert flat[SIZES.n_weights - 1] == -1


class Seen(TracingDevice):
    """Notes what a group's device asks of the whole one."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.asked: list[Any] = []

    def communicator(self, name: str, partition: Any = None) -> str:
        self.asked.append([list(group) for group in partition])
        return super().communicator(name, partition)

    def send_recv(self, stream: int, communicator: str, sends: Any, receives: Any) -> None:
        self.asked.append([message.peer for message in (*sends, *receives)])
        super().send_recv(stream, communicator, sends, receives)

    def range(self, label: str, **options: Any) -> Any:
        self.asked.append(label)
        return super().range(label, **options)


def test_a_group_sees_its_members_and_the_device_sees_ranks() -> None:
    """Rank 3 of 4 is member 1 of the group of 1 and 3."""
    device = Seen(3, 4)
    compute = device.stream()
    group = GroupDevice(device, Group(((0, 2), (1, 3)), 3), compute)
    assert (group.rank, group.size) == (1, 2)
    device.has_one_buffer = True  # what a fault tells a scheme, through whatever lies between
    assert group.has_one_buffer
    assert group.stream() == compute
    assert group.stream() != compute
    group.communicator("all")
    group.communicator("alone", [[0], [1]])
    tensor = group.empty((1,), torch.float32)
    group.send_recv(compute, "all", [Message(tensor, 0)], [Message(tensor, 0)])
    for label in ("send_recv tensor=kv peers=0", "attention hop=1", "no label of ours"):
        with group.range(label):
            pass
    assert device.asked == [
        [[0, 2], [1, 3]],
        [[0], [2], [1], [3]],
        [1, 1],
        "send_recv tensor=kv peers=1",
        "attention hop=1",
        "no label of ours",
    ]
