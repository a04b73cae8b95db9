"""What a device kernel is, by its name: one ordered table of patterns.

The names are those seen in traces of V100 to H200, MI250 and MI300 (2021 to 2026) and those defined by fla 0.6.0,
liger 0.8.5, mamba-ssm and Inductor. Order matters: a communication kernel may have a GEMM's words in it, an optimizer
an element-wise kernel's.
"""

from __future__ import annotations

import re

COMMUNICATION = "communication"
COPY = "copy"
FSDP_COPY = "FSDP copy"
OPTIMIZER = "optimizer"
LINEAR_ATTENTION = "linear attention"
ATTENTION = "attention"
MASK_BUILDING = "mask building"
OTHER = "other"

_PATTERNS: tuple[tuple[str, str], ...] = (
    (
        COMMUNICATION,
        r"nccl|rccl|nvshmem|msccl|deep_?ep|ep::(inter|intra)node|symm_?mem|multimem|(one|two)_shot_all|mscclpp"
        r"|allreduce_kernel|cross_device_reduce",
    ),
    # FSDP2 around its collectives (torch 2.11, _fsdp_collectives.py): _foreach_copy_ into the buffer of the all-gather,
    # told from an optimizer's multi_tensor_apply by its functor; the split behind it; chunk_cat before reduce-scatter.
    (FSDP_COPY, r"multi_tensor_apply.*\bCopy<|split_with_sizes_copy_out|chunk_cat_cuda"),
    (
        OPTIMIZER,
        r"multi_tensor_apply|adam|adagrad|lamb_|fused_sgd|FusedSgd|lion_|muon|l2norm_scale|clip_grad|sum_of_squares"
        r"|lpnorm_cleanup",
    ),
    (
        LINEAR_ATTENTION,
        # TileLang names a kernel after its function; fla 0.6.0's chunk_bwd.py (Hopper's backward) calls it `kernel`.
        r"^kernel_kernel$|gated_delta|delta_rule|chunk_(fwd|bwd)_kernel|chunk_(local|global)_cumsum|chunk_scaled_dot_kkt|chunk_o_fwd"
        r"|chunk_h_(fwd|bwd)|chunk_dqkwg|chunk_dv_local|chunk_dg_bwd|recompute_w_u|wy_repr|solve_tril"
        r"|merge_16x16_to_\d+x\d+_inverse|fused_recurrent|fused_chunk|gdn_|fused_beta_sigmoid|flash_?qla|kda_"
        r"|tilelang.*chunk|tilelang_(kkt_solve|prepare_d?h|correct_h0|group_reduce_vector)|chunk_scan|chunk_state|chunk_cumsum|bmm_chunk|state_passing|selective_scan|ssd_"
        r"|mamba|rwkv|retention",
    ),
    (
        ATTENTION,
        r"flash|fmha|sdpa|attention|attn_(fwd|bwd)|_attn_|mha_|aiter.*(fwd|bwd)|ck_tile.*fmha|flex_att|varlen"
        r"|dot_do_o|triton_tem_fused.*flex|paged_att",
    ),
    (
        "convolution",
        r"conv|dgrad|wgrad|winograd|scudnn|miopen|igemm_(fwd|bwd|wrw)|fprop|im2col|nchwToNhwc|nhwcToNchw|SubTensorOp"
        r"|batched_transpose|naive_conv|fft2d",
    ),
    (
        "norm",
        r"layer_?norm|rms_?norm|batch_?norm|group_?norm|GammaBeta|bn_(fw|bw)|l2norm|triton_(red|per)_fused.*rsqrt"
        r"|triton_(red|per)_fused.*norm|RowwiseMoments|ComputeInternalGradients",
    ),
    # The first is TRL 1.16's head (kernels/chunked_logprob.py): nothing else in the stack has names as bare.
    (
        "loss and softmax",
        r"^_(forward|backward)_kernel$|cross_entropy|nll_(loss|kernel)|NLLCriterion|soft_?max|logsumexp|_ce_|kl_div|jsd",
    ),
    (
        "GEMM",
        r"gemm|gemv|nvjet|xmma|cutlass|splitK|Cijk_|cublas|\bmatmul|_matmul_|hmma|wgmma|triton_tem_fused.*mm|dot_kernel"
        r"|trsm|solve_triangular|trmm|scal_kernel",
    ),
    (
        COPY,
        r"direct_copy|CatArray|copy_device_to_device|memcpy|transpose_|permute|split_with_sizes|copy_kernel"
        r"|bfloat16_?copy|float16_?copy|unrolled_elementwise_kernel<at::native::copy",
    ),
    (
        "embedding and index",
        r"embedding|index|gather|scatter|masked_select|nonzero|RadixSort|\bsort|cub::|take_|topk|searchsorted|unique"
        r"|write_indices|compute_grad_weight|partials?_(per_)?segment",  # nonzero, embedding's backward
    ),
    ("dropout and random", r"dropout|distribution_|philox|uniform|normal_kernel|bernoulli|random"),
    ("reduction", r"reduce_kernel|reduce_|triton_(red|per)_|cumsum|scan_|prefix_sum"),
    (
        "element-wise",
        r"elementwise|triton_poi_|swiglu|silu|gelu|geglu|relu|sigmoid|rope|rotary|output_gate|\badd_|mul_kernel|FillFunctor"
        r"|foreach|pointwise|quantize|tanh|arange|triu_tril",
    ),
)

GROUPS = (*(group for group, _ in _PATTERNS), MASK_BUILDING, "memset", OTHER)
"""Every group a kernel can be in."""

_COMPILED = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _PATTERNS)


def kernel_group(name: str, kind: str = "kernel") -> str:
    """The group of a device event, one of `GROUPS`.

    Args:
        name: its name in the trace.
        kind: "kernel", "memcpy" or "memset"; the last two need no pattern.
    """
    if kind == "memset":
        return "memset"
    if kind == "memcpy":
        return COPY
    return next((group for group, pattern in _COMPILED if pattern.search(name)), OTHER)


_MASK_RANGE = re.compile(
    r"create_\w*mask|create_block_mask|_update_causal_mask|masking_utils|mask[ _](build|creation)|build_\w*mask",
    re.IGNORECASE,
)


def builds_masks(range_name: str) -> bool:
    """Whether a named range on the host (annotation or Python function) is the building of an attention mask.

    Mask kernels are ordinary comparisons and sums; only the range they are launched from tells (attention-gym#149).
    """
    return _MASK_RANGE.search(range_name) is not None


_DATA_RANGE = re.compile(
    r"enumerate\(DataLoader\)|^\W*data_?load(er|ing)?\W*$|dataloader\.py\(\d+\): __next__", re.IGNORECASE
)


def loads_data(range_name: str) -> bool:
    """Whether a named range on the host is the wait for the next batch."""
    return _DATA_RANGE.search(range_name) is not None


_SYNC_CALLS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cudaMemcpy2D",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "hipStreamSynchronize",
        "hipDeviceSynchronize",
        "hipEventSynchronize",
        "hipMemcpy",
        "hipMemcpyWithStream",
    }
)


def blocks_host(call: str) -> bool:
    """Whether a runtime or driver call waits for the device. cudaEventQuery and its like only look."""
    return call in _SYNC_CALLS


def starts_work(call: str) -> bool:
    """Whether a runtime or driver call starts device work, by name: for files without device events."""
    return "Launch" in call and "HostFunc" not in call
