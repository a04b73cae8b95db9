"""Fake kernel packages on disk, and a private copy of a modeling file that binds to them.

transformers binds when a modeling file is imported, so each fake needs a fresh import. A copy under another module name
gives that without touching the classes that the other tests use.
"""

import importlib
import importlib.util
import sys
import textwrap
from pathlib import Path

import torch
import transformers
import transformers.models.qwen3_5.modeling_qwen3_5  # now, while no fake is on the path: it binds for good
from kernel_models import COMMON, DELTA_NET

PACKAGES = ("fla", "causal_conv1d", "liger_kernel", "mamba_ssm")

# Heavy imports stay inside the functions: importing a fake once more in another process must not cost a torch import.
RIGHT_RULE = """
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                               use_qk_l2norm_in_kernel=False, cu_seqlens=None):
        from hf_speedkit.kernels.reference import chunk_gated_delta_rule as right
        return right(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
"""
RIGHT_CONVOLUTION = """
    def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
        from hf_speedkit.kernels.reference import causal_conv1d_fn as right
        return right(x, weight, bias, activation, seq_idx)
"""
RULE_SIGNATURE = "q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None"


def rule(body, signature=RULE_SIGNATURE):
    """A fake chunk_gated_delta_rule that changes the right one: `call(q, k, v, ...)` is the right one's output."""
    return f"""
    def chunk_gated_delta_rule({signature}):
        import torch
        from hf_speedkit.kernels.reference import chunk_gated_delta_rule as right
        def call(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=locals().get("cu_seqlens")):
            return right(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens)[0]
{textwrap.indent(textwrap.dedent(body).strip(), " " * 8)}
"""


def write_fakes(root: Path, *, fla=None, kda="", convolution=None):
    """Lay packages under `root`; None leaves a package out. Text is the module that holds the function."""
    if fla is not None:
        folder = root / "fla" / "ops"
        folder.mkdir(parents=True)
        (root / "fla" / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "gated_delta_rule.py").write_text(textwrap.dedent(fla))
        (folder / "kda.py").write_text(textwrap.dedent(kda))
        _metadata(root, "flash-linear-attention", "0.6.0")
    if convolution is not None:
        (root / "causal_conv1d").mkdir()
        (root / "causal_conv1d" / "__init__.py").write_text(textwrap.dedent(convolution))
        _metadata(root, "causal-conv1d", "1.7.0")


def write_modules(root: Path, **modules):
    """Further modules of fakes: `fla__modules__norm="..."` becomes fla/modules/norm.py, packages as needed."""
    for name, text in modules.items():
        *folders, last = name.split("__")
        folder = root
        for part in folders:
            folder /= part
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{last}.py").write_text(textwrap.dedent(text))


def model_bound_to(root: Path, monkeypatch):
    """A tiny Qwen3.5 whose functions are bound to what can be imported from `root`."""
    monkeypatch.syspath_prepend(str(root))
    forget_fakes()
    modeling = fresh_copy_of_modeling_file("qwen3_5", monkeypatch)
    torch.manual_seed(0)
    return modeling.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**COMMON, **DELTA_NET))


def forget_fakes():
    """A module that was imported stays findable after its folder has left the path: drop it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    importlib.invalidate_caches()


def fresh_copy_of_modeling_file(family, monkeypatch):
    name = f"transformers.models.{family}.modeling_{family}_copy"
    path = Path(transformers.__file__).parent / "models" / family / f"modeling_{family}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def _metadata(root, name, version):
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
