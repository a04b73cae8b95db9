"""Combinations of GPU and versions that are known to work or to fail for training, each with its source.

Rows are evidence, not proof: an issue is a report, read on 2026-11-29 and mostly not repeated here. "Measured" is on
one H200. To add one: append a Row to the tuple of its subject, with the link; tests/kernels/test_compatibility.py
checks that every row can match and that its command would mend it.
"""

from __future__ import annotations

from hf_speedkit.kernels.compatibility import Compatibility, Row

_OK, _BLOCKED, _UNKNOWN = Compatibility.OK, Compatibility.BLOCKED, Compatibility.UNKNOWN
_FLA = "https://github.com/fla-org/flash-linear-attention/"
_CONV = "https://github.com/Dao-AILab/causal-conv1d/"
_FLASH = "https://github.com/Dao-AILab/flash-attention/"
_TILELANG = "https://github.com/tile-ai/tilelang/"
_TRITON = "https://github.com/triton-lang/triton/"
_TRANSFORMERS = "https://github.com/huggingface/transformers/"
_HOPPER, _BLACKWELL = ("sm90",), ("sm100", "sm103", "sm110", "sm120", "sm121")
_HOPPER_TRITON = ">=3.4.0,<3.7.1"
_MEASURED = "benchmarks/results/first_look/2026-11-29_h200_27b_cut_8_layers_rung_speedkit.json"

_FLA_ROWS = (
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="fla needs triton, which is not installed; transformers then says that fla itself is missing",
        source=_TRANSFORMERS + "blob/v5.23.0/src/transformers/integrations/hub_kernels.py",
        versions={"fla-core": ">=0"},
        absent=("triton",),
        pins=("triton>=3.7.1",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="TRITON_INTERPRET=1 runs every Triton kernel in Python on the host, right and thousands of times slower",
        source="https://triton-lang.org/main/programming-guide/chapter-3/debugging.html",
        versions={"fla-core": ">=0"},
        when_set="TRITON_INTERPRET",
        fix="unset TRITON_INTERPRET",
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="fla 0.6.0 on Hopper refuses its gated backward with triton [3.4.0, 3.7.1): the forward runs, the first "
        "backward raises (torch 2.8 to 2.12.0 bring such a triton; pip will warn that torch pins it)",
        source=_FLA + "pull/983",
        architectures=_HOPPER,
        versions={"fla-core": ">=0.6,<0.7", "triton": _HOPPER_TRITON},
        absent=("tilelang",),
        pins=("triton>=3.7.1",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="fla 0.6.0 uses tilelang only where it finds nvcc; without it triton [3.4.0, 3.7.1) runs and its gated "
        "backward raises on Hopper",
        source=_FLA + "blob/v0.6.0/fla/backends.py",
        architectures=_HOPPER,
        versions={"fla-core": ">=0.6,<0.7", "triton": _HOPPER_TRITON, "tilelang": ">=0"},
        absent=("flash-qla",),
        nvcc=False,
        pins=("triton>=3.7.1",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="fla before 0.6 on Hopper with triton [3.4.0, 3.7.1) computes wrong gradients of k and g, silently",
        source=_FLA + "pull/826",
        architectures=_HOPPER,
        versions={"fla-core": "<0.6", "triton": _HOPPER_TRITON},
        pins=("flash-linear-attention>=0.6,<0.7", "triton>=3.7.1"),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="fla before 0.6 on Blackwell: races, NaN gradients and hangs were reported",
        source=_FLA + "issues/913",
        architectures=_BLACKWELL,
        versions={"fla-core": "<0.6"},
        pins=("flash-linear-attention>=0.6,<0.7", "triton>=3.8.0"),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason='triton 3.4 aborts on Blackwell while compiling ("Failed to hoist tmem_store")',
        source=_TRITON + "issues/8695",
        architectures=_BLACKWELL,
        versions={"triton": ">=3.4,<3.5"},
        pins=("triton>=3.8.0",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="the ptxas that triton 3.5 brings does not know this GPU",
        source=_TRITON + "issues/10331",
        architectures=("sm110", "sm121"),
        versions={"triton": ">=3.5,<3.6"},
        unless_set="TRITON_PTXAS_PATH",
        fix="export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas  # of CUDA 13",
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="flash-qla 0.1.3, which fla picks by itself, does not compile its backward with tilelang 0.1.15, which "
        "its metadata allow (met on an H200; that run's file was not kept)",
        source="https://pypi.org/project/flash-qla/0.1.3/",
        architectures=("sm90", "sm100", "sm103"),
        versions={"flash-qla": "==0.1.3", "tilelang": ">=0.1.15"},
        pins=("tilelang==0.1.13",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="tilelang 0.1.11 with apache-tvm-ffi 0.1.12 or newer ends the process on import",
        source=_TILELANG + "issues/2367",
        versions={"fla-core": ">=0", "tilelang": "==0.1.11", "apache-tvm-ffi": ">=0.1.12"},
        pins=("tilelang==0.1.13",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="tilelang up to 0.1.8 does not import or compile with apache-tvm-ffi 0.1.10 or newer",
        source=_TILELANG + "issues/2040",
        versions={"fla-core": ">=0", "tilelang": "<=0.1.8", "apache-tvm-ffi": ">=0.1.10"},
        pins=("tilelang==0.1.13",),
    ),
    Row(
        subject="fla",
        verdict=_BLOCKED,
        reason="tilelang 0.1.13 and later need apache-tvm-ffi below 0.1.13 (flash-attn-4 alone lets pip pick more)",
        source="https://pypi.org/project/tilelang/0.1.13/",
        versions={"fla-core": ">=0", "tilelang": ">=0.1.13,<=0.1.15", "apache-tvm-ffi": ">=0.1.13"},
        pins=("apache-tvm-ffi>=0.1.11,<0.1.13",),
    ),
    Row(
        subject="fla",
        verdict=_UNKNOWN,
        reason="triton before 3.3 is below what fla 0.6.0 supports",
        source="https://pypi.org/project/fla-core/0.6.0/",
        versions={"fla-core": ">=0.6", "triton": "<3.3"},
        pins=("triton>=3.7.1",),
    ),
    Row(
        subject="fla",
        verdict=_UNKNOWN,
        reason="triton before 3.8.0 has a race at 8 warps on Blackwell; fla 0.6.0 avoids those configurations",
        source=_TRITON + "issues/10590",
        architectures=_BLACKWELL,
        versions={"fla-core": ">=0.6", "triton": "<3.8.0"},
        pins=("triton>=3.8.0",),
    ),
    Row(
        subject="fla",
        verdict=_UNKNOWN,
        reason="flash-qla before 0.1.3 may have inaccurate gradients of strong decay; mended in July 2026",
        source="https://github.com/QwenLM/FlashQLA/pull/28",
        architectures=("sm90", "sm100", "sm103"),
        versions={"fla-core": ">=0", "flash-qla": "<0.1.3"},
        pins=("flash-qla>=0.1.3",),
    ),
    Row(
        subject="fla",
        verdict=_OK,
        reason="fla 0.6.0 with triton 3.7.1 or newer lifts its own block on Hopper",
        source=_FLA + "pull/983",
        architectures=_HOPPER,
        versions={"fla-core": ">=0.6,<0.7", "triton": ">=3.7.1"},
    ),
    Row(
        subject="fla",
        verdict=_OK,
        reason="tilelang takes over the backward that triton may not run on Hopper; it trained on an H200",
        source=_MEASURED,
        architectures=_HOPPER,
        versions={"fla-core": ">=0.6,<0.7", "triton": _HOPPER_TRITON, "tilelang": "==0.1.13"},
        nvcc=True,
    ),
    Row(
        subject="fla",
        verdict=_OK,
        reason="triton before 3.4 is not concerned by the block on Hopper",
        source=_FLA + "pull/983",
        architectures=_HOPPER,
        versions={"fla-core": ">=0.6,<0.7", "triton": ">=3.3,<3.4"},
    ),
    Row(
        subject="fla",
        verdict=_OK,
        reason="fla's block is for Hopper only",
        source=_FLA + "pull/983",
        architectures=("sm8*",),
        versions={"fla-core": ">=0.6,<0.7", "triton": ">=3.3"},
    ),
)

_CONVOLUTION_ROWS = (
    Row(
        subject="causal_conv1d",
        verdict=_BLOCKED,
        reason="causal-conv1d built with CUDA 13 gives wrong outputs on this GPU (off by 0.4 and more)",
        source=_CONV + "issues/105",
        architectures=("sm103",),
        versions={"causal-conv1d": "<=1.7.0"},
        cuda=">=13",
        fix="pip uninstall causal-conv1d  # hf_speedkit then binds fla's Triton convolution",
    ),
    Row(
        subject="causal_conv1d",
        verdict=_UNKNOWN,
        reason="prebuilt wheels of causal-conv1d hold no kernel for this GPU",
        source=_CONV + "issues/119",
        architectures=("sm121",),
        versions={"causal-conv1d": ">=0"},
        fix='pip install --no-build-isolation --no-binary causal-conv1d "causal-conv1d>=1.7"',
    ),
    Row(
        subject="causal_conv1d",
        verdict=_OK,
        reason="built from source against the installed torch, it trained on an H200",
        source=_MEASURED,
        architectures=_HOPPER,
        versions={"causal-conv1d": "==1.7.0"},
    ),
)

_ATTENTION_ROWS = (
    Row(
        subject="flash_attention_4",
        verdict=_BLOCKED,
        reason="its backward needs compute capability 9.0: on this GPU it only runs forward",
        source=_FLASH + "blob/main/flash_attn/cute/interface.py",
        architectures=("sm7*", "sm8*"),
        fix='attn_implementation="sdpa"  # SpeedSFTTrainer runs packed rows on torch\'s own flash attention',
    ),
    Row(
        subject="flash_attention_3",
        verdict=_BLOCKED,
        reason="transformers demands compute capability 8.0 for it",
        source=_TRANSFORMERS + "blob/v5.23.0/src/transformers/modeling_flash_attention_utils.py",
        architectures=("sm7*",),
        fix='attn_implementation="sdpa"',
    ),
    *(
        Row(
            subject=name,
            verdict=_UNKNOWN,
            reason="flash-attn and flash-attn-4 share the import name `flash_attn`: which one runs depends on the "
            "order they were installed in",
            source=_TRANSFORMERS + "blob/v5.23.0/src/transformers/utils/import_utils.py",
            versions={"flash-attn": ">=0", "flash-attn-4": ">=0.dev0"},
            fix="pip uninstall flash-attn  # or flash-attn-4: the one that is not used",
        )
        for name in ("flash_attention_2", "flash_attention_4")
    ),
    Row(
        subject="flash_attention_2",
        verdict=_UNKNOWN,
        reason="flash-attn 2.8 wheels for another torch fail with an undefined symbol; there is none for torch 2.11",
        source=_FLASH + "issues/2425",
        versions={"flash-attn": ">=2.8,<2.9", "torch": ">=2.8"},
        fix='pip install --no-build-isolation --no-binary flash-attn "flash-attn>=2.8"',
    ),
    Row(
        subject="flash_attention_4",
        verdict=_UNKNOWN,
        reason="on this GPU its backward has no score modification, mask modification or sink",
        source=_FLASH + "blob/main/flash_attn/cute/interface.py",
        architectures=("sm120",),
    ),
    Row(
        subject="flash_attention_4",
        verdict=_UNKNOWN,
        reason="on this GPU head sizes above 128 are supported only as (192, 128) and (256, 256)",
        source="https://github.com/pytorch/pytorch/issues/195603",
        architectures=("sm100", "sm110"),
    ),
    Row(
        subject="flash_attention_4",
        verdict=_OK,
        reason="head sizes 8 to 256, forward and backward",
        source=_FLASH + "blob/main/flash_attn/cute/interface.py",
        architectures=_HOPPER,
        versions={"flash-attn-4": ">=4.0.0b36"},
        absent=("flash-attn",),
    ),
)

_OTHER_ROWS = (
    Row(
        subject="kernels",
        verdict=_BLOCKED,
        reason="transformers 5.23 accepts `kernels` from 0.18.2 to below 0.19 only, and PyPI ends at 0.17.2: hub "
        "kernels are off although the package is there",
        source=_TRANSFORMERS + "issues/47312",
        versions={"kernels": "<0.18.2", "transformers": ">=5.23,<5.25"},
        fix="install the kernel packages themselves (fla, causal-conv1d, flash-attn) instead of `kernels`",
    ),
    Row(
        subject="kernels",
        verdict=_BLOCKED,
        reason="transformers 5.23 accepts `kernels` below 0.19 only: hub kernels are off although the package is there",
        source=_TRANSFORMERS + "issues/47312",
        versions={"kernels": ">=0.19", "transformers": ">=5.23,<5.25"},
        pins=("kernels>=0.18.2,<0.19",),
    ),
    Row(
        subject="liger_kernel",
        verdict=_OK,
        reason="its RMSNorm and SwiGLU trained on an H200",
        source=_MEASURED,
        architectures=_HOPPER,
        versions={"liger-kernel": "==0.8.5", "transformers": ">=5.23,<6"},
    ),
    Row(
        subject="speedkit_varlen",
        verdict=_OK,
        reason="torch's variable-length attention trained at head size 256 on an H200",
        source=_MEASURED,
        architectures=_HOPPER,
        versions={"torch": ">=2.11,<2.12"},
    ),
)

# Older than pyproject.toml asks for, on any GPU. What the probe shows right is not refused: the GPU knows better.
_OLD_ROWS = tuple(
    Row(
        subject=subject,
        verdict=_UNKNOWN,
        reason=f"{package} before {lowest} was not tested with hf_speedkit",
        source="pyproject.toml",
        versions={package: f"<{lowest}"},
        pins=(pin,),
    )
    for subject, package, lowest, pin in (
        ("fla", "fla-core", "0.6", "flash-linear-attention>=0.6,<0.7"),
        ("causal_conv1d", "causal-conv1d", "1.7", "causal-conv1d>=1.7"),
        ("liger_kernel", "liger-kernel", "0.8.5", "liger-kernel>=0.8.5"),
    )
)

ROWS: tuple[Row, ...] = (*_FLA_ROWS, *_CONVOLUTION_ROWS, *_ATTENTION_ROWS, *_OTHER_ROWS, *_OLD_ROWS)
"""Every known combination."""
