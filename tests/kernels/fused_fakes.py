"""Fake liger_kernel and fla with the signatures of liger-kernel 0.8.5 and fla 0.6.0, in plain torch for a CPU."""

from fake_kernels import RIGHT_RULE, _metadata, write_fakes, write_modules

RMS = """
    import torch
    class LigerRMSNormFunction:
        @staticmethod
        def apply(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
            assert in_place is False
            scale = torch.rsqrt(X.float().square().mean(-1, keepdim=True) + eps)
            if casting_mode == "llama":
                return W * (X.float() * scale).to(X.dtype)
            return (X.float() * scale * (offset + W.float())).to(X.dtype)
"""
SWIGLU = """
    import torch
    class LigerSiLUMulFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b, gate_multiplier=1.0, down_multiplier=1.0):
            ctx.save_for_backward(a, b)
            return torch.nn.functional.silu(a) * b
        @staticmethod
        def backward(ctx, dc):
            a, b = ctx.saved_tensors
            sigmoid = torch.sigmoid(a)
            da = dc * b * sigmoid * (1 + a * (1 - sigmoid))
            db = dc * a * sigmoid
            a.data.copy_(da)  # the real one writes its gradients into what it saved, past autograd's version counter
            b.data.copy_(db)
            return da, db, None, None
"""
FLA_NORM = """
    import torch
    def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
        assert bias is None
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)
"""
FLA_GATED = """
    import torch
    def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
                       eps=1e-6):
        assert bias is None and activation == "swish"
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (normed * weight.float() * torch.nn.functional.silu(g.float())).to(x.dtype)
"""
FLA_SWIGLU = """
    import torch
    def swiglu(x, y):
        return torch.nn.functional.silu(x) * y
"""
FLA_CONVOLUTION = """
    import torch
    calls = []
    def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False,
                      activation=None, backend="triton", cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
                      cp_context=None, **kwargs):
        from hf_speedkit.kernels.reference import causal_conv1d_fn as right
        calls.append({"cu_seqlens": cu_seqlens, "chunk_indices": chunk_indices, **kwargs})
        documents = None
        if cu_seqlens is not None:
            place = torch.arange(x.shape[1], dtype=cu_seqlens.dtype)
            documents = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)[None]
        return right(x.transpose(1, 2), weight, bias, activation, documents).transpose(1, 2), None
"""


def write_fused_fakes(root, *, liger=None, fla=None):
    """Lay both packages under `root`; `liger` and `fla` replace or leave out (None) single modules."""
    if liger is not False:
        modules = {"ops__rms_norm": RMS, "ops__swiglu": SWIGLU, **(liger or {})}
        write_modules(root, **{f"liger_kernel__{name}": text for name, text in modules.items() if text is not None})
        _metadata(root, "liger-kernel", "0.8.5")
    if fla is not False:
        write_fakes(root, fla=RIGHT_RULE)
        modules = {
            "norm__layernorm": FLA_NORM,
            "norm__fused_norm_gate": FLA_GATED,
            "activations": FLA_SWIGLU,
            "causal_conv1d": FLA_CONVOLUTION,
            **(fla or {}),
        }
        write_modules(root, **{f"fla__modules__{name}": text for name, text in modules.items() if text is not None})
