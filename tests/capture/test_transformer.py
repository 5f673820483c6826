"""What a block around attention holds and sends, against numbers counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cptrace.capture.run_spec import RunSpec
from cptrace.errors import UsageError
from cptrace.schemes.transformer import block_memory, block_traffic, default_ffn, require_split

LLAMA = RunSpec(model="llama", cp_size=2, seq_len=8, heads=4, kv_heads=2, head_dim=2, hidden=6, ffn=10)


def test_weights_are_counted() -> None:
    """qkv 6 x 16, out 8 x 6, gate and up 6 x 20, down 10 x 6, two norms of 6; shared by two, all but norms halve."""
    whole, half = LLAMA.block, replace(LLAMA, tp_size=2).block
    assert whole.n_weights == 6 * 16 + 8 * 6 + 6 * 20 + 10 * 6 + 2 * 6
    assert half.n_weights == 6 * 8 + 4 * 6 + 6 * 10 + 5 * 6 + 2 * 6
    assert whole.weight_bytes == 4 * whole.n_weights


def test_a_llama_7b_has_its_weights() -> None:
    """4 x 4096^2 of attention, 3 x 4096 x 11008 of the feed-forward layer, two norms; all but embeddings of 6.7e9."""
    spec = replace(LLAMA, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008)
    assert spec.block.n_weights == 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert 32 * spec.block.n_weights == pytest.approx(6.74e9 - 2 * 32_000 * 4096, rel=0.001)


def test_sums_and_gradients_are_all_reduced() -> None:
    """336 weights over 2 ranks: all of them sent once; 4 tokens of 6 elements over 3 ranks: 4/3 of them, twice."""
    forward, backward = block_traffic(LLAMA.block)
    assert (forward, backward) == ((0, 0), (336 * 4, 1))
    forward, backward = block_traffic(replace(LLAMA.block, tp_size=3))
    assert forward == (2 * (4 * 4 * 6 * 4 // 3), 2)
    assert backward.n_messages == 3


def test_gradients_are_filled_up_so_that_the_group_divides_them() -> None:
    spec = replace(LLAMA, cp_size=5, seq_len=10)
    assert spec.block.n_weights % 5 == 1
    assert block_traffic(spec.block)[1] == (2 * 4 * (spec.block.n_weights + 4) * 4 // 5, 1)


def test_ranks_that_share_the_sequence_have_gradients_alone_to_send() -> None:
    alone = replace(LLAMA, scheme="single", cp_size=1)
    assert block_traffic(alone.block) == ((0, 0), (0, 0))


def test_memory_grows_with_weights_and_tokens() -> None:
    """Of 4 tokens: 4 x 6 + 3 x 10 elements kept, once 4 x 6 + 16 + 3 x 10; weights and gradients."""
    memory = block_memory(LLAMA.block)
    assert memory.per_layer == 4 * (2 * 336 + 4 * (4 * 6 + 3 * 10))
    assert memory.once == 4 * 4 * (4 * 6 + 16 + 3 * 10)


def test_the_feed_forward_layer_is_8_3_of_the_hidden_size() -> None:
    assert [default_ffn(hidden) for hidden in (6, 128, 256, 4096)] == [16, 352, 688, 10928]


def test_what_divides_is_listed() -> None:
    require_split({"--heads": 8, "--ffn": 12}, 4, "--tp-size")
    with pytest.raises(UsageError, match=r"--tp-size 8 does not divide --ffn 12; use --tp-size 1, 2, 4$"):
        require_split({"--heads": 8, "--ffn": 12}, 8, "--tp-size")


def test_a_scheme_that_splits_heads_is_a_mesh_of_weights_alone() -> None:
    spec = replace(LLAMA, scheme="tp", heads=4, kv_heads=4)
    assert (spec.sequence_ranks, spec.weight_ranks, spec.n_ranks) == (1, 2, 2)
    assert (spec.block.tp_size, spec.block.attention.cp_size, spec.block.attention.heads) == (2, 1, 2)
    assert spec.block.attention.local_len == 8
