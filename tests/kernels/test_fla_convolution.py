"""fla's convolution in the place of causal-conv1d: same numbers, its own chunks, no wait for the device."""

import sys

import pytest
import torch
from fake_kernels import forget_fakes, model_bound_to, write_fakes
from fused_fakes import FLA_CONVOLUTION, write_fused_fakes
from kernel_models import gradients_one_document_at_a_time, packed_gradients, packed_row, random_documents, tiny_model

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.core.records import KernelCheck, KernelVerdict
from hf_speedkit.kernels.fla_convolution import FlaConvolution, bind_fla_convolution, chunk_indices, through_fla
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.imports import ImportOutcome, ImportStatus
from hf_speedkit.kernels.inspection import check_kernels
from hf_speedkit.kernels.verdicts import why_not_bound

CPU = ("cpu",)
LENGTHS = (5, 64, 1, 130, 63)


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


@pytest.fixture
def model(tmp_path, monkeypatch):
    write_fused_fakes(tmp_path)
    return model_bound_to(tmp_path, monkeypatch)


def borders_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def calls():
    return sys.modules["fla.modules.causal_conv1d"].calls


def convolution_of(model):
    return next(check for check in check_kernels(model) if check.function == "causal_conv1d_fn")


@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), LENGTHS, (1,) * 70, (200, 3, 64, 64, 1)])
def test_every_chunk_is_there_once_and_those_too_many_lie_behind_the_last_document(lengths):
    chunks = chunk_indices(borders_of(lengths), sum(lengths))
    wanted = [[n, c] for n, length in enumerate(lengths) for c in range(-(-length // 64))]
    assert chunks.dtype == torch.int32
    assert chunks[: len(wanted)].tolist() == wanted
    for document, chunk in chunks[len(wanted) :].tolist():
        assert document == len(lengths) - 1
        assert chunk * 64 >= lengths[-1]


def test_packed_gradients_are_those_of_the_documents_alone(model):
    documents = random_documents(LENGTHS)
    wanted = gradients_one_document_at_a_time(model, documents)
    with bind_fla_convolution(model, devices=CPU) as binding:
        assert [name.rpartition(".")[2] for name in binding.functions] == ["causal_conv1d_fn"]
        found = packed_gradients(model, documents, slots=300)
    assert len(calls()) == 3  # one per layer: it did run
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_the_chunk_indices_of_the_batch_do_not_reach_it_and_its_own_are_made_once_a_forward(model):
    inputs, _ = packed_row(random_documents(LENGTHS))
    theirs = torch.full((7, 2), 99, dtype=torch.int32)
    with bind_fla_convolution(model, devices=CPU):
        model(**inputs, chunk_indices=theirs)
    found = [call["chunk_indices"] for call in calls()]
    assert len(found) == 3
    assert all(chunks is found[0] for chunks in found)
    assert torch.equal(found[0], chunk_indices(inputs["cu_seq_lens_q"], sum(LENGTHS)))
    assert {key for call in calls() for key in call} == {"cu_seqlens", "chunk_indices"}


def test_a_buffer_that_is_filled_anew_gets_new_chunks(model):
    bound = FlaConvolution(lambda *args, **kwargs: None, None, CPU)
    borders = borders_of((100, 28))
    before = bound._chunk_indices(borders, 128)
    assert bound._chunk_indices(borders, 128) is before
    borders.copy_(borders_of((28, 100)))
    assert not torch.equal(bound._chunk_indices(borders, 128), before)


def test_the_next_row_gets_chunks_of_its_own(model):
    bound = FlaConvolution(lambda *args, **kwargs: None, None, CPU)
    for lengths in ((100, 28), (28, 100)):
        assert torch.equal(bound._chunk_indices(borders_of(lengths), 128), chunk_indices(borders_of(lengths), 128))


@pytest.mark.parametrize("change", ["no_borders", "grown"])
def test_a_packed_row_it_cannot_keep_apart_is_refused(model, change):
    inputs, _ = packed_row(random_documents(LENGTHS))
    if change == "no_borders":
        del inputs["cu_seq_lens_q"]
    else:
        inputs["seq_idx"] = inputs["seq_idx"][:, :-1]
    with bind_fla_convolution(model, devices=CPU), pytest.raises(ConfigurationError, match="PackedCollator"):
        model(**inputs)


def test_rows_that_are_not_packed_run_on_it_too(model):
    ids = torch.stack(random_documents([20, 20]))
    wanted = model(input_ids=ids, use_cache=False).logits
    with bind_fla_convolution(model, devices=CPU):
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
    assert [call["cu_seqlens"] for call in calls()] == [None] * 3


def test_on_another_device_and_after_undo_the_fallback_runs_and_refuses_packed_rows(model):
    inputs, _ = packed_row(random_documents(LENGTHS))
    with bind_fla_convolution(model), pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**inputs)
    binding = bind_fla_convolution(model, devices=CPU)
    binding.undo()
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**inputs)
    assert calls() == []


def test_two_models_hold_it_together(model):
    first, second = bind_fla_convolution(model, devices=CPU), bind_fla_convolution(model, devices=CPU)
    first.undo()
    first.undo()
    assert convolution_of(model).verdict is KernelVerdict.FUSED
    second.undo()
    assert convolution_of(model).verdict is KernelVerdict.FALLBACK


def test_v52_it_is_inspected_and_probed_like_the_package_it_stands_for(model):
    with bind_fla_convolution(model, devices=CPU):
        (check,) = [check for check in check_kernels(model, probe=True) if check.function == "causal_conv1d_fn"]
    assert check.verdict is KernelVerdict.FUSED
    assert check.evidence.startswith("fla 0.6.0: fla.modules.causal_conv1d, in the place of causal_conv1d; ran both")


def test_a_causal_conv1d_that_is_there_is_left_alone(tmp_path, monkeypatch):
    write_fakes(tmp_path, convolution="def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None): ...")
    write_fused_fakes(tmp_path)
    assert bind_fla_convolution(model_bound_to(tmp_path, monkeypatch), devices=CPU).functions == ()


def test_without_fla_the_import_error_comes_through():
    with pytest.raises(ImportError, match="fla"):
        bind_fla_convolution(tiny_model("qwen3_5"), devices=CPU)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FLA_CONVOLUTION.replace("activation, documents)", "activation, None)"), "NO_BOUNDARIES"),
        (FLA_CONVOLUTION.replace("return right(", "return 1.1 * right("), "BROKEN: the output is off by"),
        (FLA_CONVOLUTION.replace(", weight, bias, ", ", weight.detach(), bias, "), "FORWARD_ONLY: no gradient reaches"),
        ('raise ImportError("no triton")', "it fails to import: ImportError: no triton"),
    ],
    ids=["leaks", "v53_wrong_numbers", "no_gradient", "import"],
)
def test_a_convolution_that_the_probe_rejects_is_taken_out_again(tmp_path, monkeypatch, caplog, text, reason):
    write_fused_fakes(tmp_path, fla={"causal_conv1d": text})
    model = model_bound_to(tmp_path, monkeypatch)
    with fused_layers(model, devices=CPU) as lines:
        assert not any(line.startswith("convolution") for line in lines)
        assert convolution_of(model).verdict is KernelVerdict.FALLBACK
    assert f"fla's convolution is left out: {reason}" in caplog.text


@pytest.mark.parametrize("rule_fix", ['pip install "triton>=3.7.1"', None])
def test_v52_a_fla_that_does_not_import_is_mended_and_no_compiler_asked_for(tmp_path, monkeypatch, rule_fix):
    """None: fla works, the convolution was looked at, and what was found stands."""
    write_fused_fakes(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    state = {"layer": "GatedDeltaNet", "layers": 3, "layers_total": 4, "verdict": KernelVerdict.FALLBACK}
    absent = why_not_bound("causal_conv1d", ImportOutcome(status=ImportStatus.ABSENT))
    rule = KernelCheck(function="chunk_gated_delta_rule", evidence="torch", fix=rule_fix, **state)
    build = KernelCheck(function="causal_conv1d_fn", evidence="torch", reason=absent, fix="build it", **state)
    found = through_fla((rule, build))[1]
    assert found.fix == (rule_fix or "build it")
    assert ("once fla imports" in found.reason) is (rule_fix is not None)
