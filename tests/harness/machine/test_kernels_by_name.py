"""Oracles: names of kernels as cuBLAS, CUTLASS, Triton, FlashAttention, cuDNN, NCCL and torch give them (profiles in
public traces and issues; libraries' own sources), a real CPU profile, and the patterns of `fp8core.proof.profiled_gemms`."""

from __future__ import annotations

from harness.machine.kernels_by_name import CLASSES, kernel_class

NAMES = {
    "fp8_gemm": [
        "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
        "nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN",
        "nvjet_qqhsh_256x128_128x4_1x2_h_bz_coopA_TNT",
        "nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_cgasize1x2x1_stage4_gmmastage2_tensor64x128x32",
        "sm90_xmma_gemm_e4m3f32_e4m3f32_f32_tn_n_tilesize128x128x128",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int>, cutlass::gemm"
        "::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedFP8, cutlass::float_e4m3_t>>>",
        "cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128_1x2x1_0_tnn_align16_warpspecialized",
        "aten::_scaled_mm", "aten::_scaled_mm_v2", "fp8core::matmul", "_fp8_matmul_kernel",
    ],
    "bf16_gemm": [
        "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN",
        "nvjet_sm100_tst_64x32_64x16_2x1_2cta_h_bz_TNT",
        "nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x1_tn_align8>(cutlass_80_wmma)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, __nv_bfloat16, float, true, false>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>",
        "triton_tem_fused_addmm_3", "aten::mm", "aten::addmm", "aten::bmm", "harness::grouped_mm",
    ],
    "cast": [
        "triton_red_fused__to_copy_abs_max_view_0",
        "triton_per_fused__to_copy_abs_clamp_max_mul_reciprocal_view_1",
        "triton_red_fused_abs_max_2",
        "triton_poi_fused__to_copy_clamp_mul_t_5",
        "triton_red_fused_abs_amax_0",
        "void at::native::unrolled_elementwise_kernel<at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<4, direct_copy(c10::Float8_e4m3fn)>",
        "_cast_kernel", "_cast_both_kernel", "_cast_rows_cols_kernel", "_amax_kernel",
        "fp8core::cast_tensorwise", "aten::amax", "aten::abs", "aten::clamp",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cutlass::bfloat16_t>>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_efficient_attention_forward",
        "triton_tem_fused_flex_attention_0",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>",
        "aten::_fused_adamw_", "Optimizer.step#AdamW.step",
    ],
    "collective": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_ReduceScatter_RING_LL_Sum_bf16", "nccl:all_gather", "gloo:all_reduce", "c10d::allreduce_",
        "_c10d_functional::all_gather_into_tensor",
    ],
    "other": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>",
        "triton_poi_fused_add_gelu_4", "triton_red_fused_native_layer_norm_1", "_rms_norm_kernel", "_swiglu_kernel",
        "Memcpy DtoD (Device -> Device)", "Memset (Device)", "aten::mul", "aten::copy_", "aten::gelu", "",
    ],
}  # fmt: skip
CASES = [(name, kind) for kind, names in NAMES.items() for name in names]


def test_names() -> None:
    assert set(NAMES) == set(CLASSES)
    assert {name: kernel_class(name) for name, _ in CASES} == dict(CASES)
