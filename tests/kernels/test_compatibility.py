"""The table of known combinations: pure decisions, and what they do to checks."""

import dataclasses
import sys
from pathlib import Path

import pytest
from fake_kernels import forget_fakes, write_fakes
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from transformers import AutoConfig

from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels import stack as stack_of_this_machine
from hf_speedkit.kernels.compatibility import Compatibility, Row, Stack, decide, install_pins
from hf_speedkit.kernels.compatibility_rows import ROWS
from hf_speedkit.kernels.imports import installed_version
from hf_speedkit.kernels.inspection import assert_kernels, check_kernels
from hf_speedkit.kernels.known import notes, with_known_combinations, without_what_ends_the_process
from hf_speedkit.kernels.stack import DISTRIBUTIONS, lacking, parse_architecture, read_stack

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


def stack(capability=HOPPER, *, nvcc=False, cuda="13.0", **versions):
    return Stack(
        capability=capability,
        versions={name.replace("_", "-"): version for name, version in versions.items()},
        python="3.12.3",
        cuda=cuda,
        nvcc=nvcc,
    )


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


@pytest.mark.parametrize(
    ("capability", "triton", "fla", "verdict", "fix"),
    [
        (HOPPER, "3.6.0", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.7.1"'),
        (HOPPER, "3.4.0", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.7.1"'),
        (HOPPER, "3.7.0", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.7.1"'),
        (HOPPER, "3.6.0+git1234", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.7.1"'),
        (HOPPER, "3.6.0rc1", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.7.1"'),
        (HOPPER, "nightly", "0.6.0", Compatibility.UNKNOWN, None),
        (HOPPER, "3.7.1", "0.6.0", Compatibility.OK, None),
        (HOPPER, "3.3.1", "0.6.0", Compatibility.OK, None),
        (AMPERE, "3.6.0", "0.6.0", Compatibility.OK, None),
        ((8, 9), "3.6.0", "0.6.0", Compatibility.OK, None),
        (HOPPER, "3.6.0", "0.5.1", Compatibility.BLOCKED, None),
        (HOPPER, "3.7.1", "0.7.0", Compatibility.UNKNOWN, None),
        ((7, 5), "3.6.0", "0.6.0", Compatibility.UNKNOWN, None),
        (None, "3.6.0", "0.6.0", Compatibility.UNKNOWN, None),
        (BLACKWELL, "3.6.0", "0.6.0", Compatibility.UNKNOWN, 'pip install "triton>=3.8.0"'),
        (BLACKWELL, "3.4.0", "0.6.0", Compatibility.BLOCKED, 'pip install "triton>=3.8.0"'),
        (BLACKWELL, "3.8.0", "0.5.1", Compatibility.BLOCKED, None),
    ],
)
def test_v48_gpu_triton_and_fla_together_are_ok_blocked_or_unknown(capability, triton, fla, verdict, fix):
    decision = decide("fla", stack(capability, triton=triton, fla_core=fla))
    assert decision.verdict is verdict
    if fix is not None:
        assert decision.fix == fix
    assert (decision.source is not None) == (decision.reason is not None)


@pytest.mark.parametrize(
    ("nvcc", "verdict"), [(True, Compatibility.OK), (False, Compatibility.BLOCKED)], ids=["nvcc", "no_nvcc"]
)
def test_v48_tilelang_lifts_the_block_on_hopper_only_with_a_compiler(nvcc, verdict):
    found = decide("fla", stack(nvcc=nvcc, triton="3.6.0", fla_core="0.6.0", tilelang="0.1.13"))
    assert found.verdict is verdict


@pytest.mark.parametrize(("version", "verdict"), [("0.1.2", Compatibility.UNKNOWN), ("0.1.3", Compatibility.OK)])
def test_flash_qla_is_unverified_until_its_gradients_were_mended(version, verdict):
    """0.1.3 passed the probe and trained on an H200 with this triton and tilelang (docs/speed.md)."""
    machine = stack(nvcc=True, triton="3.6.0", fla_core="0.6.0", tilelang="0.1.13", flash_qla=version)
    found = decide("fla", machine)
    assert found.verdict is verdict
    assert (found.fix == 'pip install "flash-qla>=0.1.3"') == (version == "0.1.2")


@pytest.mark.parametrize(
    ("subject", "machine", "says"),
    [
        ("fla", stack(fla_core="0.6.0"), "needs triton"),
        (
            "fla",
            stack(nvcc=True, triton="3.6.0", fla_core="0.6.0", tilelang="0.1.15", flash_qla="0.1.3"),
            "does not compile its backward",
        ),
        (
            "fla",
            stack(AMPERE, triton="3.6.0", fla_core="0.6.0", tilelang="0.1.11", apache_tvm_ffi="0.1.12"),
            "ends the process",
        ),
        ("causal_conv1d", stack((10, 3), causal_conv1d="1.7.0"), "wrong outputs"),
        ("kernels", stack(kernels="0.17.2", transformers="5.23.0"), "hub kernels are off"),
        ("kernels", stack(kernels="0.19.0", transformers="5.23.0"), "below 0.19"),
        ("flash_attention_4", stack(AMPERE, flash_attn_4="4.0.0b36"), "only runs forward"),
    ],
)
def test_combinations_that_fail_are_blocked_with_the_reason(subject, machine, says):
    decision = decide(subject, machine)
    assert decision.verdict is Compatibility.BLOCKED
    assert says in decision.reason
    assert decision.fix is not None


def test_a_failure_outweighs_a_success_and_no_row_at_all_is_unknown():
    good = Row(subject="x", verdict=Compatibility.OK, reason="a", source="b")
    bad = dataclasses.replace(good, verdict=Compatibility.BLOCKED)
    assert decide("x", stack(), [good, bad]).verdict is Compatibility.BLOCKED
    assert decide("x", stack(), [good]).verdict is Compatibility.OK
    assert decide("y", stack(), [good]).verdict is Compatibility.UNKNOWN


def test_the_kernels_window_does_not_concern_a_causal_conv1d_built_for_cuda_12():
    assert decide("causal_conv1d", stack((10, 3), cuda="12.8", causal_conv1d="1.7.0")).verdict is Compatibility.UNKNOWN


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.subject}-{row.verdict.value}")
def test_every_row_is_well_formed_has_a_source_and_names_distributions_that_are_read(row):
    assert row.source.startswith("https://") or (Path(__file__).parents[2] / row.source).is_file()
    assert {*row.versions, *row.absent} <= set(DISTRIBUTIONS)
    for wanted in (*row.versions.values(), *([row.cuda] if row.cuda else [])):
        SpecifierSet(wanted)
    for pin in row.pins:
        Requirement(pin)
    assert row.verdict is not Compatibility.BLOCKED or row.command is not None
    assert row.verdict is not Compatibility.OK or row.command is None


@pytest.mark.parametrize("row", [row for row in ROWS if row.pins], ids=lambda row: f"{row.subject}-{row.pins}")
def test_the_pins_of_a_row_lead_out_of_it(row):
    """With the lowest version that the pins allow, the row no longer matches."""
    lowest = {}
    for pin in map(Requirement, row.pins):
        name = "fla-core" if pin.name == "flash-linear-attention" else pin.name
        lowest[name] = next(s.version for s in pin.specifier if s.operator in (">=", "=="))
    inside = {name: lowest.get(name, "") for name in row.versions}
    versions = {name: version for name, version in {**inside, **lowest}.items() if version}
    assert set(row.versions) & set(versions) or set(row.absent) & set(versions)
    assert not row.matches(Stack(capability=HOPPER, versions=versions, nvcc=bool(row.nvcc), cuda="13.0"))


def test_pins_for_a_package_that_is_not_there_yet_are_those_it_would_need():
    brought = {"fla-core": "0.6.0"}
    assert install_pins("fla", stack(triton="3.6.0"), brought) == ("triton>=3.7.1",)
    assert install_pins("fla", stack(triton="3.7.1"), brought) == ()
    assert install_pins("fla", stack(AMPERE, triton="3.6.0"), brought) == ()


def check(function="chunk_gated_delta_rule", verdict=KernelVerdict.FUSED, evidence="fla 0.6.0: fla.ops", fix=None):
    return KernelCheck(
        function=function, verdict=verdict, layer="L", layers=1, layers_total=1, evidence=evidence, fix=fix
    )


def test_v48_a_fused_check_on_a_blocked_combination_is_blocked_with_source_and_pin():
    (found,) = with_known_combinations([check()], stack(triton="3.6.0", fla_core="0.6.0"))
    assert found.verdict is KernelVerdict.BLOCKED
    assert "fla-org/flash-linear-attention/pull/983" in found.reason
    assert found.fix == 'pip install "triton>=3.7.1"'


def test_a_check_without_rows_and_a_fine_combination_stay_as_they_are():
    machine = stack(triton="3.7.1", fla_core="0.6.0")
    checks = (check(), check("rms_norm", evidence="liger_kernel"), check("experts", evidence="grouped_mm"))
    assert with_known_combinations(checks, machine) == checks


def test_v48_the_command_for_an_absent_fla_on_hopper_installs_the_triton_it_needs():
    fix = 'pip install "flash-linear-attention>=0.6,<0.7"'
    absent = check(verdict=KernelVerdict.FALLBACK, evidence="transformers' torch fallback", fix=fix)
    (on_hopper,) = with_known_combinations([absent], stack(triton="3.6.0"))
    assert on_hopper.fix == f'{fix} "triton>=3.7.1"'
    (on_ampere,) = with_known_combinations([absent], stack(AMPERE, triton="3.6.0"))
    assert on_ampere.fix == fix


def test_another_package_in_the_place_of_causal_conv1d_is_not_judged_by_its_rows():
    machine = stack((10, 3), causal_conv1d="1.7.0")
    stand_in = check("causal_conv1d_fn", evidence="fla 0.6.0: fla.modules.causal_conv1d")
    own = check("causal_conv1d_fn", evidence="causal_conv1d 1.7.0: causal_conv1d.causal_conv1d_interface")
    verdicts = [found.verdict for found in with_known_combinations([stand_in, own], machine)]
    assert verdicts == [KernelVerdict.FUSED, KernelVerdict.BLOCKED]


def test_attention_is_judged_by_the_name_its_evidence_begins_with():
    attention = check("attention", evidence="flash_attention_4, flash_attn 4.0.0b36")
    (found,) = with_known_combinations([attention], stack(AMPERE, flash_attn_4="4.0.0b36"))
    assert found.verdict is KernelVerdict.BLOCKED


def test_v48_a_config_is_refused_before_any_model_is_built(tmp_path, monkeypatch):
    write_fakes(
        tmp_path,
        fla="def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens=None): ...",
        convolution="def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None): ...",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AutoConfig.for_model("qwen3_5")
    with pytest.raises(KernelAssertionError, match="a combination of versions known to fail"):
        assert_kernels(config, stack=stack(triton="3.6.0", fla_core="0.6.0"))
    assert_kernels(config, stack=stack(triton="3.7.1", fla_core="0.6.0"))


def test_a_package_that_fla_loads_and_that_ends_the_process_blocks_fla_and_not_this_process(tmp_path, monkeypatch):
    (tmp_path / "tilelang.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(str(tmp_path))
    convolution = check("causal_conv1d_fn", evidence="causal_conv1d 1.7.0")
    rule, other = without_what_ends_the_process([check(), convolution])
    assert (rule.verdict, rule.fix) == (KernelVerdict.BLOCKED, "pip uninstall tilelang")
    assert "SIGABRT" in rule.reason
    assert other == convolution


def test_v52_a_config_without_causal_conv1d_is_fused_through_fla_where_there_is_a_gpu(tmp_path, monkeypatch):
    write_fakes(
        tmp_path, fla="def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens=None): ..."
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = AutoConfig.for_model("qwen3_5")

    def convolution(machine):
        return next(c for c in check_kernels(config, stack=machine) if c.function == "causal_conv1d_fn")

    found = convolution(stack(triton="3.7.1", fla_core="0.6.0"))
    assert (found.verdict, found.evidence[:9]) == (KernelVerdict.FUSED, "fla 0.6.0")
    without_gpu = convolution(stack(None))
    assert (without_gpu.verdict, without_gpu.fix) == (KernelVerdict.FALLBACK, None)
    assert "fla's convolution takes its place on a GPU only" in without_gpu.reason


def test_notes_are_of_what_is_installed_and_the_blocked_come_first():
    machine = stack(triton="3.7.1", fla_core="0.6.0", kernels="0.17.2", transformers="5.23.0", torch="2.13.0")
    assert [note.subject for note in notes(machine)] == ["kernels", "fla"]


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("sm90", (9, 0)),
        ("sm_90a", (9, 0)),
        ("9.0", (9, 0)),
        ("SM103", (10, 3)),
        ("8.9", (8, 9)),
        ("h200", (9, 0)),
        ("H100 SXM", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("RTX 4090", (8, 9)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("l40s", (8, 9)),
        ("B200", (10, 0)),
    ],
)
def test_architectures_are_read_in_every_spelling(text, capability):
    assert parse_architecture(text) == capability
    assert read_stack(architecture=text).capability == capability


@pytest.mark.parametrize("text", ["hopper", "9", "", "sm"])
def test_what_is_no_architecture_is_refused(text):
    with pytest.raises(ValueError, match="sm90"):
        parse_architecture(text)


def hide_installed(monkeypatch, *kept):
    """As if these kernel packages were not there, but for those that a test has written: a CUDA torch brings triton."""
    for name in ("triton", "fla", "causal_conv1d"):
        if name in kept:
            monkeypatch.delitem(sys.modules, name, raising=False)
        else:
            monkeypatch.setitem(sys.modules, name, None)


def test_triton_is_found_under_the_name_that_nightly_torch_gives_it(monkeypatch):
    """Without it fla would be refused for the lack of a triton that is there."""
    versions = {"pytorch-triton": "3.8.0+git12", "fla-core": "0.6.0"}
    monkeypatch.setattr(stack_of_this_machine, "_version", versions.get)
    hide_installed(monkeypatch)
    assert read_stack().versions == {"triton": "3.8.0+git12", "fla-core": "0.6.0"}


@pytest.mark.parametrize(
    ("versions", "source", "read"),
    [
        ({"triton-rocm": "3.7.0"}, {}, {"triton": "3.7.0"}),
        ({"flash-linear-attention": "0.2.1"}, {}, {"fla-core": "0.2.1", "flash-linear-attention": "0.2.1"}),
        ({}, {"triton": "3.6.0", "causal_conv1d": "1.7.0"}, {"triton": "3.6.0", "causal-conv1d": "1.7.0"}),
        ({"triton": "3.7.1", "pytorch-triton": "3.3.0"}, {"triton": "3.3.0"}, {"triton": "3.3.0"}),
    ],
    ids=["another_name", "fla_before_fla_core", "clones_without_metadata", "two_in_one_folder"],
)
def test_v48_versions_are_those_of_what_is_imported(tmp_path, monkeypatch, versions, source, read):
    monkeypatch.setattr(stack_of_this_machine, "_version", versions.get)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, version in source.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'raise RuntimeError\n__version__ = "{version}"\n')
    hide_installed(monkeypatch, *source)
    assert read_stack().versions == read
    assert [installed_version(name) for name in source] == list(source.values())


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({}, Compatibility.OK),
        ({"FLA_TILELANG": "0"}, Compatibility.BLOCKED),
        ({"FLA_DISABLE_BACKEND_DISPATCH": "1"}, Compatibility.BLOCKED),
        ({"TRITON_INTERPRET": "1"}, Compatibility.BLOCKED),
        ({"TRITON_INTERPRET": "0"}, Compatibility.OK),
    ],
)
def test_v48_what_fla_is_told_not_to_use_lifts_no_block(monkeypatch, environment, verdict):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    here = read_stack()
    machine = stack(nvcc=True, triton="3.6.0", fla_core="0.6.0", tilelang="0.1.13")
    machine = dataclasses.replace(machine, unused=here.unused, variables=here.variables)
    assert decide("fla", machine).verdict is verdict


@pytest.mark.parametrize("row", [row for row in ROWS if row.command and "export" in row.command])
def test_a_variable_that_is_to_mend_a_row_leads_out_of_it(monkeypatch, row):
    name, _, value = row.command.removeprefix("export ").partition("  ")[0].partition("=")
    lowest = {each: next(s.version for s in SpecifierSet(wanted)) for each, wanted in row.versions.items()}
    machine = stack(parse_architecture(row.architectures[0]), **lowest)
    assert row.matches(machine)
    monkeypatch.setenv(name, value)
    here = read_stack()
    assert not row.matches(dataclasses.replace(machine, unused=here.unused, variables=here.variables))


def test_v48_an_amd_gpu_that_counts_as_9_0_is_no_hopper():
    machine = dataclasses.replace(stack(triton="3.6.0", fla_core="0.6.0"), amd="gfx90a")
    assert decide("fla", machine).verdict is Compatibility.UNKNOWN
    assert machine.architecture == "gfx90a"


@pytest.mark.parametrize(
    ("capability", "built_for", "lacks"),
    [
        ((12, 0), ("sm_75", "sm_80", "sm_90"), True),
        ((7, 0), ("sm_75", "sm_80", "compute_90"), True),
        ((8, 9), ("sm_75", "sm_80"), False),
        ((9, 0), ("sm_80", "sm_90a"), False),
        ((12, 0), ("sm_90", "compute_90"), False),
        ((9, 0), ("gfx942",), False),
        ((9, 0), (), False),
    ],
)
def test_v52_a_torch_built_without_this_gpu_is_told_by_its_list(capability, built_for, lacks):
    assert bool(lacking(capability, built_for)) is lacks


def test_v52_a_torch_built_without_this_gpu_refuses_every_model():
    machine = dataclasses.replace(stack((12, 0), torch="2.11.0"), torch_lacks=("sm_80", "sm_90"))
    with pytest.raises(KernelAssertionError, match="holds no kernels for sm120") as error:
        assert_kernels(AutoConfig.for_model("llama"), stack=machine)
    assert "whl/cu130" in str(error.value)


def test_this_machine_is_read_without_importing_a_kernel_package():
    machine = read_stack()
    assert {"torch", "transformers"} <= set(machine.versions)
    assert (machine.capability is None) == (machine.architecture is None)
