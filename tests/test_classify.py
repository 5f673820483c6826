"""What kernels and copies are taken for: real names of every library that moves data or computes in training."""

from __future__ import annotations

from pathlib import Path

import pytest

import cptrace
from cptrace.classify import COLLECTIVES, COMM, COMPUTE, COPY, KERNEL_RULES, ROLES, RULE_NAMES, classify
from cptrace.launches import find_launches
from cptrace.names import function_name
from cptrace.sources import read_trace
from tests.support.tiny_export import START_END, TinyExport

ARGS = "(ncclDevKernelArgsStorage<(unsigned long)4096>)"

COMMUNICATION = {
    # NCCL 2.0 to 2.7: the algorithm, the protocol and the operation are in the name of the kernel
    "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "all_reduce",
    "ncclAllReduceTreeLLKernel_sum_f16(ncclColl)": "all_reduce",
    "ncclAllGatherRingLLKernel_copy_i8(ncclColl)": "all_gather",
    "ncclReduceScatterRingLLKernel_sum_f16(ncclColl)": "reduce_scatter",
    "ncclBroadcastRingLLKernel_copy_i8(ncclColl)": "broadcast",
    "ncclSendRecvKernel_copy_i8(ncclColl)": "send_recv",
    # NCCL 2.8 to 2.18
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclKernel_AllReduce_TREE_LL_Sum___nv_bfloat16(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "all_gather",
    "ncclKernel_ReduceScatter_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)": "reduce_scatter",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_Reduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "other",
    # NCCL 2.19 and later
    f"ncclDevKernel_AllReduce_Sum_bf16_RING_LL{ARGS}": "all_reduce",
    f"ncclDevKernel_AllReduce_Sum_f32_TREE_LL{ARGS}": "all_reduce",
    f"ncclDevKernel_AllGather_RING_LL{ARGS}": "all_gather",
    f"ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL{ARGS}": "reduce_scatter",
    f"ncclDevKernel_SendRecv{ARGS}": "send_recv",
    "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    f"ncclDevKernel_Broadcast_RING_LL{ARGS}": "broadcast",
    f"ncclDevKernel_Reduce_Sum_f32_RING_LL{ARGS}": "other",
    # NCCL 2.27 and later: symmetric memory
    "ncclSymDevKernel_AllGather_LL(ncclSymDevArgs)": "all_gather",
    "ncclSymDevKernel_AllReduce_AGxLLMC_R_Sum_bf16(ncclSymDevArgs)": "all_reduce",
    "ncclSymkDevKernel_ReduceScatter_LDMC_Sum_bf16(ncclSymkDevWorkArgs4K)": "reduce_scatter",
    "ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs4K)": "all_gather",
    # AMD and Microsoft
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "other",
    "mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "other",
    # NVSHMEM, DeepEP
    "void nvshmemi_transfer_put_threadgroup<(threadgroup_t)1>(void*, void*, unsigned long)": "other",
    "nvshmemx_barrier_kernel(int)": "other",
    "void deep_ep::intranode::dispatch<(int)8, (int)768, (int)8192>(int4*, float*, int*)": "other",
    "void deep_ep::internode_ll::combine<(bool)0, (int)7168, (int)9>(void*, void*)": "other",
    "void dpsk::ep::internode::notify_dispatch<(bool)0, (int)8>(int const*, int*)": "other",
    # Symmetric memory of PyTorch; custom all-reduces of vLLM, SGLang, TensorRT-LLM and FlashInfer
    "void c10d::symmetric_memory::(anonymous namespace)::barrier_kernel(unsigned int**, int)": "other",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, (int)16>(c10::BFloat16*)": "all_reduce",
    "void <unnamed>::multimem_one_shot_all_reduce_kernel<c10::BFloat16, (int)16>(c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<(int)16>(char*, char*, unsigned int**)": "all_gather",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<float, (int)16, (int)8>(float**)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::Half, (int)8>(c10::Half**)": "all_reduce",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, (int)8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void sglang::cross_device_reduce_2stage<half, (int)4>(sglang::RankData*)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, (int)8>(AllReduceParams)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(int)0>(X)": "all_reduce",
    # Transformer Engine
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<(int)8>(int, int, int, void*)": "other",
    "kuserbuffers_pushrecv(int, int, int, int, int4*, int4*, int)": "send_recv",
    "kuserbuffers_pullsend(int, int, int*, int*, int4*)": "send_recv",
    # Our emulated device
    "cptrace_cpu::gloo_SendRecv": "send_recv",
    "cptrace_cpu::gloo_AllToAll": "all_to_all",
    "cptrace_cpu::gloo_ReduceScatter": "reduce_scatter",
    # User kernels that say what they are
    "_all_gather_gemm_push_kernel": "all_gather",
    "void my::ulysses::all_to_all_4d<float>(float*, float*)": "all_to_all",
    "std::enable_if<(bool)1, void>::type ncclLikeKernel_all_reduce<float>(float*)": "all_reduce",
}

COMPUTATION = {
    # Attention, as in context-parallel traces
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)64, (int)4>>(Flash_fwd_params)": "attention",
    "void flash::flash_fwd_splitkv_kernel<flash::Traits<(int)128>, (bool)1>(flash::Flash_fwd_params)": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T, (bool)1>(pytorch_flash::P)": "attention",
    "void flash::flash_bwd_dot_do_o_kernel<(bool)1, flash::Traits<(int)128>>(flash::Flash_bwd_params)": "attention",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<T>(pytorch_flash::Flash_bwd_params, int)": "attention",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm100FlashAttentionForwardSm100_object_at_": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x128_kernel0_0": "attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<T>>>(Params)": "attention",
    "void ck_tile::kentry<(int)256, (int)1, ck_tile::FmhaFwdKernel<ck_tile::Pipeline>>(ck_tile::Args)": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": "attention",
    "fmha_cutlassB_bf16_aligned_128x64_k128_dropout_sm80(PyTorchMemEffAttention::Params)": "attention",
    "void fused_attention_kernel<float>(float*)": "attention",
    # Matrix products
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN": "gemm",
    "nvjet_hsh_64x32_64x16_1x4_h_bz_TNT": "gemm",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": "gemm",
    "ampere_sgemm_128x64_tn": "gemm",
    "volta_h884gemm_256x128_ldg8_nn": "gemm",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel": "gemm",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>(T::Params)": "gemm",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>>>(T::Params)": "gemm",
    "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, __nv_bfloat16>(cublasLt::Params)": "gemm",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, (bool)0>(Params)": "gemm",
    "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI32x32x8x1": "gemm",
    "void gemmk1_kernel<int, float, (int)256, (int)5, (bool)1>(cublasGemmk1Params<float>)": "gemm",
    # PyTorch
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<c10::Half>>(int)": "pytorch",
    "void at::native::elementwise_kernel<(int)128, (int)4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operator ()() const::"
    "[lambda() (instance 12)]::operator ()() const::[lambda(c10::BFloat16) (instance 1)]>>(int, T3)": "pytorch",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType"
    "<(unsigned int)2>, unsigned int, (int)4, (int)64, (int)64>(char*)": "pytorch",
    "void at::native::<unnamed>::cunn_SoftMaxForward<(int)8, float, float>(float*, const float*, int)": "pytorch",
    "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::Policy>(int)": None,
    # Triton and Inductor: names of fused kernels list graph nodes, collectives among them
    "triton_poi_fused__to_copy_add_mul_0": "inductor",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_cat_3": "inductor",
    "triton_red_fused__fused_rms_norm_all_reduce_wait_tensor_7": "inductor",
    "triton_per_fused_reduce_scatter_tensor_native_layer_norm_1": "inductor",
    "triton_tem_fused_all_to_all_single_mm_2": "inductor",
    "triton_unk_fused_all_gather_into_tensor_mm_0": "inductor",
    "triton_spl_fused_all_gather_into_tensor_cumsum_0": "inductor",
    "triton_for_fused_all_reduce_0": "inductor",
    "triton_fused_all_reduce_add_0": "inductor",
    "triton_mm": "triton",
    "_layer_norm_fwd_1pass_kernel": "triton",
    # Others
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, (int)512>(cudnnTensorStruct)": "cudnn",
    "void transformer_engine::scaled_aligned_causal_masked_softmax_warp_forward<float>(float*)": "library",
    "void cub::CUB_200400_900_NS::DeviceReduceKernel<Policy>(int)": "library",
    "void multi_tensor_apply_kernel<TensorListMetadata<(int)4>, AdamFunctor<float>>(long, int*)": "common-name",
    "cptrace_cpu::flash_attention_forward": "emulated-attention",
    "cptrace_cpu::merge_partial_out": "emulated-compute",
    # Collectives only in template or call arguments, or inside another word: not communication
    "void my::relu<ncclRedOp_t, (int)4>(float*)": "fallback",
    "void my::scale<float, my::AllReduceTag>(float*, ncclComm*)": "fallback",
    "void fuse<all_gather::Policy<Deep<int>>>(nvshmem_team*)": "fallback",
    "void apply<std::integral_constant<(bool)((int)2 > (int)1)>, cross_device_reduce>(int)": "fallback",
    "void stencil(deep_ep::Config, userbuffers*)": "fallback",
    "wave_step": "fallback",
    "kernel": "fallback",
    "void (anonymous namespace)::physics::advance<double>(double*)": "fallback",
    "void [lambda(int) (instance 1)]::operator ()(int) const": "fallback",
}  # fmt: skip


def classified(export, tmp_path):
    trace = read_trace(export.write(tmp_path / "t.sqlite"))
    return classify(trace, find_launches(trace.ops, trace.api_calls)).ops


@pytest.fixture(scope="module")
def of_name(tmp_path_factory):
    """Return role, collective, rule and is_unclassified by kernel name."""
    export = TinyExport()
    for position, name in enumerate([*COMMUNICATION, *COMPUTATION]):
        export.kernel(name, 10 * position, 10 * position + 5)
    ops = classified(export, tmp_path_factory.mktemp("names"))
    columns = ops[["role", "collective", "rule", "is_unclassified"]].astype(object)
    return dict(zip(ops["name"], columns.itertuples(index=False), strict=True))


@pytest.mark.parametrize(("name", "kind"), COMMUNICATION.items())
def test_communication(name, kind, of_name):
    found = of_name[name]
    assert (found.role, found.collective, found.is_unclassified) == (COMM, kind, False), found.rule


@pytest.mark.parametrize(("name", "rule"), COMPUTATION.items())
def test_computation(name, rule, of_name):
    found = of_name[name]
    assert found.role == COMPUTE, found.rule
    assert found.collective != found.collective or found.collective is None
    assert rule is None or (found.rule, found.is_unclassified) == (rule, rule == "fallback")


def test_every_name_is_distinct_and_there_are_many():
    assert not COMMUNICATION.keys() & COMPUTATION.keys()
    assert len(COMMUNICATION) + len(COMPUTATION) >= 100


def test_every_rule_decides_some_name(of_name):
    """A rule that no real name needs is a rule that nobody has checked."""
    extra = {"peer-copy", "copy-engine-collective", "copy", "whole-graph", "rccl"}
    assert {found.rule for found in of_name.values()} >= {rule.name for rule in KERNEL_RULES} - extra
    assert len(set(RULE_NAMES)) == len(RULE_NAMES)
    assert {rule.role for rule in KERNEL_RULES} <= set(ROLES)


@pytest.mark.parametrize(
    ("demangled", "function"),
    [
        ("void a::b<int, c<d>>(e)", "a::b"),
        ("void a::b<c<(int)4>, (bool)1>(f<g>)", "a::b"),
        ("void (anonymous namespace)::b<int>(e)", "b"),
        ("void <unnamed>::b(e)", "b"),
        ("void a::(anonymous namespace)::b(e)", "a::b"),
        ("a::<unnamed>::b<int>(e)", "a::b"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(P)", "internal::gemvx::kernel"),
        ("__nv_bfloat16 square(int)", "square"),
        ("plain_name", "plain_name"),
        ("(unnamed kernel)", "(unnamed kernel)"),
        ("", ""),
        ("void", "void"),
    ],
)
def test_function_name(demangled, function):
    assert function_name(demangled) == function


def test_peer_copies_are_communication(tmp_path):
    """Copies between devices move data between GPUs; those to and from the host, and within a device, do not."""
    export = TinyExport()
    copies = [
        (10, None, None, COMM),
        (10, 0, 1, COMM),
        (8, 0, 1, COMM),
        (0, 1, 0, COMM),
        (8, 0, 0, COPY),
        (8, None, None, COPY),
        (8, 0, 4_294_967_295, COPY),
        (1, 0, 1, COPY),
        (2, 1, 0, COPY),
    ]
    for position, (kind, src, dst, _) in enumerate(copies):
        export.copy(10 * position, 10 * position + 5, kind=kind, src=src, dst=dst)
    export.memset(200, 210)
    ops = classified(export, tmp_path)
    assert ops["role"].tolist() == [*(role for *_, role in copies), COPY]
    assert not ops["is_unclassified"].any()
    assert ops["rule"].tolist()[0] == "peer-copy"


def test_copies_that_nccl_launches_are_a_collective(tmp_path):
    """
    host   ncclGroupEnd [0..10)     nccl:all_to_all [20..30)     ncclAllGather [40..50)
    copy         launched at 5           launched at 25                launched at 45, on another thread: 46

    NCCL names its ranges as its functions; PyTorch's `nccl:` ranges also hold layout copies, which are no traffic.
    """
    export = TinyExport()
    export.range("ncclGroupEnd", 0, 10).range("nccl:all_to_all", 20, 30).range("ncclAllGather", 40, 50)
    for launch, thread in ((5, None), (25, None), (45, None), (46, 999)):
        export.copy(launch + 100, launch + 101, launch=launch, thread=thread)
    export.memset(300, 310, launch=5)
    ops = classified(export, tmp_path)
    assert ops["role"].tolist() == [COMM, COPY, COMM, COPY, COMM]
    assert ops["collective"].astype(object).where(ops["role"] == COMM, None).tolist() == [
        "other", None, "all_gather", None, "other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ranges", "kind"),
    [
        ([], "send_recv"),
        ([("step 3", 0, 100)], "send_recv"),
        ([("nccl:all_to_all", 0, 100)], "all_to_all"),
        ([("nccl:_alltoall_base", 0, 100)], "all_to_all"),
        ([("nccl:coalesced", 0, 100)], "send_recv"),
        ([("all_to_all pass=forward layer=0 tensor=q bytes=64 peers=1", 0, 100)], "all_to_all"),
        ([("send_recv pass=forward layer=0 hop=2", 0, 100)], "send_recv"),
        ([("ncclGroupEnd", 40, 60), ("nccl:all_to_all", 0, 100)], "all_to_all"),
        ([("nccl:send 0->1", 40, 60), ("all_gather emulation", 0, 100)], "all_gather"),
        ([("my a2a", 0, 100), ("isend to 3", 45, 55)], "send_recv"),
        ([("nccl:all_to_all", 0, 50)], "send_recv"),
        ([("nccl:all_to_all", 51, 100)], "send_recv"),
        ([("nccl:all_to_all", 0, None)], "send_recv"),
    ],
)
def test_send_recv_is_told_apart_by_the_innermost_telling_range(ranges, kind, tmp_path):
    """The launch is at 50: a range [0..50) does not hold it, one without an end is not looked at."""
    export = TinyExport().kernel(f"ncclDevKernel_SendRecv{ARGS}", 200, 300, launch=50)
    for text, start, end in ranges:
        export.range(text, start, end)
    assert classified(export, tmp_path)["collective"].tolist() == [kind]


def test_ranges_of_other_threads_and_processes_tell_nothing(tmp_path):
    export = TinyExport().kernel(f"ncclDevKernel_SendRecv{ARGS}", 200, 300, launch=50)
    export.range("nccl:all_to_all", 0, 100, pid=555).range("nccl:all_to_all", 0, 100, thread=7)
    export.range("nccl:all_to_all", 0, 100, event_type=START_END, thread=8)
    assert classified(export, tmp_path)["collective"].tolist() == ["send_recv"]


def test_a_name_that_tells_its_collective_is_believed_over_ranges(tmp_path):
    export = TinyExport().kernel(f"ncclDevKernel_AllGather_RING_LL{ARGS}", 200, 300, launch=50)
    export.range("nccl:all_to_all", 0, 100)
    assert classified(export, tmp_path)["collective"].tolist() == ["all_gather"]


def test_whole_graphs_are_other_and_unclassified(tmp_path):
    ops = classified(TinyExport().graph(0, 10).kernel("nvjet_hsh", 20, 30), tmp_path)
    assert ops["role"].tolist() == ["other", "compute"]
    assert ops["is_unclassified"].tolist() == [True, False]


def test_a_trace_of_copies_alone(tmp_path):
    ops = classified(TinyExport().copy(0, 10).memset(20, 30), tmp_path)
    assert ops["role"].tolist() == [COPY, COPY]
    assert list(ops["collective"].cat.categories) == list(COLLECTIVES)


def test_copies_of_our_transfers_on_one_gpu_communicate(tmp_path: Path) -> None:
    """
    host      [send_recv ........)  [copy ...)
    stream 7     copy   reduce        copy
    """
    export = TinyExport().domain(1, "cptrace").run(transport="local-d2d")
    export.range("send_recv pass=forward layer=0 hop=0 tensor=kv bytes=64 peers=1", 0, 10, domain=1)
    export.range("copy pass=forward layer=0 hop=0", 10, 20, domain=1)
    export.copy(2, 4, launch=2).kernel("void at::native::elementwise_kernel<4>()", 5, 6, launch=5)
    export.copy(12, 14, launch=12)
    path = export.write(tmp_path / "local.sqlite")
    rows = [(row["role"], row["rule"]) for row in cptrace.analyze(path).rows("kernels")]
    assert sorted(rows) == [("comm", "local-transfer"), ("comm", "local-transfer"), ("copy", "copy")]
    assert {row["kind"] for row in cptrace.analyze(path).rows("collectives")} == {"send_recv"}
    other = TinyExport().domain(1, "cptrace").run(transport="nccl")
    other.range("send_recv pass=forward layer=0 hop=0", 0, 10, domain=1).copy(2, 4, launch=2)
    (row,) = cptrace.analyze(other.write(tmp_path / "other.sqlite")).rows("kernels")
    assert row["role"] == "copy"
