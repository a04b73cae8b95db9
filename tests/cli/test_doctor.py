"""`hf-speedkit doctor`: on machines without a GPU, a network or working packages."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_speedkit.cli.doctor import NO_COMPILER, diagnose_model
from hf_speedkit.cli.main import app
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.compatibility import Stack
from hf_speedkit.measure.environment import GpuInfo

pytestmark = pytest.mark.usefixtures("kernels_tests_on_the_path")

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(scope="module")
def kernels_tests_on_the_path():
    from pathlib import Path

    folder = str(Path(__file__).parent.parent / "kernels")
    sys.path.insert(0, folder)
    from fake_kernels import forget_fakes

    yield
    sys.path.remove(folder)
    forget_fakes()


@pytest.fixture
def folder(tmp_path):
    from kernel_models import tiny_model

    tiny_model("qwen3_5").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def without_nvcc(monkeypatch):
    from hf_speedkit.kernels import stack

    monkeypatch.setattr(stack.shutil, "which", lambda name: None)
    is_file = stack.Path.is_file
    monkeypatch.setattr(stack.Path, "is_file", lambda path: path.name != "nvcc" and is_file(path))


def said(result):
    """The text of a message without the frame that typer draws round it."""
    return " ".join(result.output.replace("│", " ").split())


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def stack(**changes):
    versions = {"torch": "2.13.0", "transformers": "5.23.0", "fla-core": "0.6.0", "triton": "3.7.1"}
    settings = {"capability": (9, 0), "versions": versions, "python": "3.12", "cuda": "13.0", "nvcc": False, **changes}
    return Stack(**settings)


@no_gpu
@pytest.mark.parametrize("name", ["", "config.json"])
def test_v45_a_folder_or_a_config_file_without_kernels_gives_one_line_per_function_and_exit_1(folder, name):
    result = run(folder / name)
    assert result.exit_code == 1
    for text in (
        "chunk_gated_delta_rule   FALLBACK   Qwen3_5GatedDeltaNet, 3 layers",
        "`fla` is not installed",
        "costs:",
    ):
        assert text in result.output
    assert f'{sys.executable} -m pip install "flash-linear-attention>=0.6,<0.7"' in result.output
    assert "something would be slow or wrong" in result.output


def test_v52_without_nvcc_one_paragraph_says_why_and_no_command_tries_to_build(folder, without_nvcc):
    result = run(folder)
    assert result.exit_code == 1
    assert result.output.count(f"{NO_COMPILER}, and this machine has no nvcc.") == 1
    assert "causal-conv1d>=1.7" not in result.output


def test_v51_a_gpu_that_the_driver_shows_and_torch_cannot_use_is_not_called_absent(monkeypatch):
    """A driver older than torch's CUDA: `torch.cuda.is_available()` is False, and training runs on the CPU."""

    def refused():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    gpu = GpuInfo(name="NVIDIA H200", memory_gib=139.0, compute_capability=(9, 0))
    monkeypatch.setattr("hf_speedkit.measure.environment.visible_gpus", lambda: (gpu,))
    monkeypatch.setattr(torch.cuda, "init", refused)
    found = diagnose_model("m", AutoConfig.for_model("llama"), stack=stack(capability=None), slots=64)
    (remark,) = [remark for remark in found.remarks if "NVIDIA H200" in remark]
    assert "too old (found version 12020)" in remark
    assert not any("No GPU was found" in remark for remark in found.remarks)


def test_v48_judged_for_a_hopper_gpu_the_command_pins_triton(folder):
    result = run(folder, "--gpu", "sm90")
    assert result.exit_code == 1
    if "`fla` is not installed" in result.output and find_spec("triton") is None:  # a CUDA torch brings one
        assert '"flash-linear-attention>=0.6,<0.7" "triton>=3.7.1"' in result.output


@no_gpu
def test_one_command_mends_both_functions_also_where_a_compiler_is_there(folder):
    """A build that fails in the same `pip install` would lose fla too, and fla's convolution does the same."""
    found = json.loads(run(folder, "--json", "--gpu", "a100").output)
    fla = f'{sys.executable} -m pip install "flash-linear-attention>=0.6,<0.7"'
    assert [command.startswith(fla) for command in found["commands"]].count(True) == 1
    assert not any("causal" in command for command in found["commands"])


@no_gpu
@pytest.mark.skipif(torch.version.cuda is not None, reason="about a torch without CUDA")
@pytest.mark.parametrize("arguments", [[], ["--gpu", "h200"]], ids=str)
def test_with_a_torch_without_cuda_the_first_thing_to_do_is_another_torch(folder, arguments):
    result = run(folder, *arguments)
    lines = [line.strip() for line in result.output.splitlines()]
    first = lines[lines.index("Run:") + 1]
    assert first.startswith(f"{sys.executable} -m pip install --force-reinstall --index-url https://pypi.org/simple")
    assert first.endswith(f'"torch=={torch.__version__.partition("+")[0]}"')
    assert "First install a CUDA build of torch" in result.output


@pytest.mark.parametrize(
    ("versions", "capability", "bad"),
    [
        ({"torch": "2.13.0+cpu"}, (9, 0), True),
        ({"torch": "2.13.0+cpu"}, None, False),
        ({"torch": "2.13.0+rocm6.4"}, (9, 0), False),
        ({}, (9, 0), False),
    ],
    ids=["cpu_build_for_a_gpu", "cpu_build_without_a_gpu", "rocm_build", "no_torch_at_all"],
)
@no_gpu
def test_a_model_that_needs_no_kernel_is_bad_on_a_gpu_that_torch_cannot_use(tmp_path, versions, capability, bad):
    from kernel_models import tiny_model

    config = tiny_model("llama").config
    diagnosis = diagnose_model("m", config, stack=stack(versions=versions, capability=capability, cuda=None), slots=64)
    assert diagnosis.good is not bad
    assert bool(diagnosis.commands) is bad


def test_json_holds_the_checks_the_machine_and_the_commands(folder):
    result = run(folder, "--json")
    found = json.loads(result.output)
    assert (found["family"], found["good"]) == ("qwen3_5", result.exit_code == 0)
    assert {check["function"] for check in found["checks"]} == {
        "causal_conv1d_fn",
        "chunk_gated_delta_rule",
        "attention",
    }
    assert "torch" in found["environment"]["packages"]
    assert found["commands"] or found["good"]


def test_a_model_that_needs_no_package_is_good_and_exits_0(tmp_path):
    from kernel_models import tiny_model

    tiny_model("llama").config.save_pretrained(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0, result.output
    assert "speedkit_varlen" in result.output
    assert result.output.rstrip().endswith("good")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "hopper"], "is no GPU that is known here; write its architecture as sm90 or 9.0, or one of v100, "),
        pytest.param(["--probe"], "no GPU", marks=no_gpu),
        (["--nonsense"], "No such option"),
    ],
)
def test_wrong_use_exits_2(folder, arguments, says):
    result = run(folder, *arguments)
    assert result.exit_code == 2
    assert says in said(result)


@pytest.mark.parametrize(
    ("family", "verdict", "says"),
    [
        ("falcon_h1", "FUSED", "speedkit_varlen, "),
        ("llama4", "FUSED", "its class cannot do without a mask"),
        ("gpt_neo", "FALLBACK", "its class has an attention of its own"),
        ("granite_swa", "FALLBACK", "it uses attention sinks"),
        ("vit", "UNVERIFIED", "no causal language model"),
    ],
)
def test_the_attention_named_is_the_one_that_the_trainer_would_choose(family, verdict, says):
    from transformers import AutoConfig

    found = diagnose_model("m", AutoConfig.for_model(family), stack=stack(), slots=8192)
    (attention,) = [check for check in found.checks if check.function == "attention"]
    assert attention.verdict.value == verdict
    assert says in f"{attention.evidence} {attention.reason}"
    assert attention.layers == found.checks[-1].layers > 0


def test_what_is_set_in_the_job_is_not_among_the_commands_for_a_shell():
    from transformers import AutoConfig

    from hf_speedkit.cli.doctor_view import text_lines

    found = diagnose_model("m", AutoConfig.for_model("mamba"), stack=stack(), slots=8192)
    assert [command.split()[0] for command in found.commands] == ["pip", "pip"]
    assert found.settings == ("packing=False  # padded rows for this family",)
    lines = text_lines(found)
    assert lines[lines.index("In the job's settings:") + 1].strip() == found.settings[0]
    # fla's convolution is no help here, and the paragraph must not say that it is.
    assert any("mamba-ssm calls causal-conv1d's compiled functions" in remark for remark in found.remarks)
    assert NO_COMPILER not in " ".join(found.remarks)


@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_a_torch_that_does_not_import_is_the_finding_and_no_traceback(folder, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(folder, *arguments)
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "is installed and cannot be imported: ModuleNotFoundError" in result.output
    assert f"{sys.executable} -m pip install --force-reinstall " in result.output
    assert not arguments or json.loads(result.output)["good"] is False


def test_no_command_for_a_shell_holds_words_that_a_shell_would_choke_on():
    from hf_speedkit.kernels.compatibility_rows import ROWS

    for command in (row.command or "" for row in ROWS):
        bare = command.partition("#")[0]
        assert not command.startswith(("pip", "export")) or "(" not in bare, command


def test_where_uv_made_the_environment_the_commands_are_uvs(monkeypatch):
    from hf_speedkit.cli import doctor_view

    monkeypatch.setattr(doctor_view.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor_view.shutil, "which", lambda name: f"/bin/{name}")
    assert doctor_view._runnable('pip install "einops"') == f'uv pip install --python {sys.executable} "einops"'
    assert doctor_view._runnable("export FLA_FLASH_QLA=0") == "export FLA_FLASH_QLA=0"


def test_a_probe_that_cannot_be_run_is_not_one_that_passed(folder, monkeypatch):
    from transformers import AutoConfig

    from hf_speedkit.kernels import skeleton

    monkeypatch.setattr(skeleton, "model_skeleton", lambda *_, **__: [][0])
    config = AutoConfig.from_pretrained(folder)
    found = diagnose_model("m", config, stack=stack(capability=None), slots=64, probe=True, device="cpu")
    assert (found.good, found.checks[-1].verdict) == (False, KernelVerdict.UNVERIFIED)
    assert "the probe could not be run: IndexError" in found.checks[-1].reason


def test_v50_broken_packages_on_the_path_are_named_and_exit_1_within_a_minute(folder, tmp_path, monkeypatch):
    from fake_kernels import write_fakes

    write_fakes(tmp_path, fla="import os; os.abort()", convolution='raise ImportError("undefined symbol: _ZN3c10")')
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.perf_counter()
    result = run(folder)
    assert time.perf_counter() - began < 60
    assert result.exit_code == 1
    assert "SIGABRT" in result.output
    assert "undefined symbol: _ZN3c10" in result.output


def test_everything_there_is_good_and_a_blocked_combination_is_not(folder, tmp_path, monkeypatch):
    from fake_kernels import write_fakes
    from transformers import AutoConfig

    write_fakes(
        tmp_path, fla="def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens=None): ..."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AutoConfig.from_pretrained(folder)
    assert diagnose_model("m", config, stack=stack(), slots=8192).good
    blocked = stack(versions={"fla-core": "0.6.0", "triton": "3.6.0"})
    diagnosis = diagnose_model("m", config, stack=blocked, slots=8192, probe=True)
    rule = next(check for check in diagnosis.checks if check.function == "chunk_gated_delta_rule")
    assert (diagnosis.good, rule.verdict) == (False, KernelVerdict.BLOCKED)
    assert diagnosis.commands == ('pip install "triton>=3.7.1"',)


def test_a_probe_runs_the_layers_without_their_weights(folder):
    """On a CPU, where only the packed attention has anything to run."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    diagnosis = diagnose_model("m", config, stack=stack(capability=None), slots=8192, probe=True, device="cpu")
    attention = next(check for check in diagnosis.checks if check.function == "attention")
    assert attention.verdict is KernelVerdict.FUSED
    assert "ran both ways on cpu in bfloat16" in attention.evidence
    assert not diagnosis.good


@pytest.mark.parametrize("earlier", [(), ("old.cubin",)], ids=["cold", "warm"])
def test_a_probe_says_where_compiled_kernels_are_kept_and_whether_they_were_there(
    folder, tmp_path, monkeypatch, earlier
):
    """The folder fills while the probe runs: here a file appears when its layers are made."""
    from transformers import AutoConfig

    from hf_speedkit.cli import doctor_view
    from hf_speedkit.kernels import skeleton

    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "nothing_there"))
    cache.mkdir()
    (cache / "kept.json").touch()
    config = AutoConfig.from_pretrained(folder)
    if not earlier:
        make = skeleton.model_skeleton
        monkeypatch.setattr(
            skeleton, "model_skeleton", lambda *args, **how: ((cache / "new.cubin").touch(), make(*args, **how))[1]
        )
    diagnosis = diagnose_model("m", config, stack=stack(capability=None), slots=64, probe=True, device="cpu")
    text = "\n".join(doctor_view.text_lines(diagnosis))
    state = "warm: nothing new" if earlier else "cold: 1 new files"
    assert f"Triton keeps what it compiled in {cache} (TRITON_CACHE_DIR); {state}" in text
    assert "TileLang" not in text
    assert "of it in first calls of the functions above" in text


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from typer.testing import CliRunner; from hf_speedkit.cli.main import app;"
        "CliRunner().invoke(app, ['doctor', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
