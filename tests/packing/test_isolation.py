"""The proof itself: it passes on models that keep documents apart, and names what leaks in those that do not."""

import copy
import sys

import pytest
import torch
from support import VOCABULARY, tiny_hybrid, tiny_llama

from hf_speedkit.core.errors import IsolationError, PackingError
from hf_speedkit.kernels import reference
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.packing.collator import PackedCollator
from hf_speedkit.packing.isolation import assert_isolation, probe_isolation

MODELING = "transformers.models.qwen3_5.modeling_qwen3_5"


def packed(lengths=(9, 7, 12, 5), slots=40, **kwargs):
    from support import token_documents

    batch = PackedCollator(0, slots)([{"input_ids": d} for d in token_documents(lengths)])
    batch.pop("token_counts")
    batch.update(kwargs)
    return {key: value for key, value in batch.items() if value is not None}


@pytest.fixture
def hybrid():
    model = tiny_hybrid()
    with bind_references(model):
        yield model


def leaky(monkeypatch, function):
    """Let one operation forget the boundaries."""
    module = sys.modules[MODELING]
    original = vars(module)[function]

    def without_boundaries(*args, **kwargs):
        return original(*args, **{**kwargs, "cu_seqlens": None, "seq_idx": None})

    monkeypatch.setattr(module, function, without_boundaries)


def test_a_boundary_aware_hybrid_is_exactly_isolated(hybrid):
    report = assert_isolation(hybrid, packed())
    assert (report.output_change, report.gradient_leak) == (0.0, 0.0)
    assert report.own_gradient > 0.0
    assert report.others_change > 0.0
    assert report.operations == ("convolution", "recurrence", "attention")
    assert report.documents == 5  # four and the padding tail


@pytest.mark.parametrize(
    ("function", "name"),
    [
        pytest.param("causal_conv1d_fn", "convolution", id="v02 the convolution leaks"),
        pytest.param("torch_chunk_gated_delta_rule", "recurrence", id="v03 the recurrence leaks"),
    ],
)
def test_the_leaking_operation_is_named(hybrid, monkeypatch, function, name):
    leaky(monkeypatch, function)
    with pytest.raises(IsolationError, match=f"see one another through {name}\n"):
        assert_isolation(hybrid, packed())


def test_v03_a_convolution_leak_does_not_hide_a_recurrence_leak(hybrid, monkeypatch):
    for function in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        leaky(monkeypatch, function)
    assert probe_isolation(hybrid, packed()).leaks == ("convolution", "recurrence")


def test_v03_a_leak_of_a_later_layer_alone_is_named(hybrid, monkeypatch):
    module = sys.modules[MODELING]
    original, calls = module.torch_chunk_gated_delta_rule, [0]
    layers = [layer for layer in hybrid.modules() if hasattr(layer, "A_log")]
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, *_: calls.__setitem__(0, layers.index(layer)))

    def leaks_in_the_last(*args, **kwargs):
        forgotten = {"cu_seqlens": None, "seq_idx": None} if calls[0] == len(layers) - 1 else {}
        return original(*args, **{**kwargs, **forgotten})

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", leaks_in_the_last)
    report = probe_isolation(hybrid, packed())
    assert (report.passed, report.leaks) == (False, ("recurrence",))
    assert report.operations == ("convolution", "recurrence", "attention")


@pytest.mark.parametrize("tolerance", ["1e-5", -1.0, float("nan")])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(PackingError, match="no change of a log-probability"):
        assert_isolation(tiny_llama(), packed(), tolerance=tolerance)


def test_a_model_or_a_batch_that_cannot_be_probed_is_told_as_such():
    with pytest.raises(IsolationError, match="LlamaModel gives no logits"):
        assert_isolation(tiny_llama().model, packed())
    with pytest.raises(PackingError, match=f"token id {VOCABULARY}, and the model's embedding has {VOCABULARY} rows"):
        assert_isolation(tiny_llama(), packed(input_ids=torch.full((1, 40), VOCABULARY)))


def test_v01_layers_that_refuse_packed_rows_are_told_as_such():
    """transformers 5.23's functions without kernels, which raise a plain ValueError."""
    with pytest.raises(IsolationError, match=r"packed row apart\n.*causal_conv1d"):
        assert_isolation(tiny_hybrid(), packed())


@pytest.mark.parametrize("a_log", [0.02, 16.0], ids=["slow decay", "fast decay"])
def test_v04_a_leak_is_seen_however_fast_the_state_forgets(hybrid, monkeypatch, a_log):
    leaky(monkeypatch, "torch_chunk_gated_delta_rule")
    with torch.no_grad():
        for name, parameter in hybrid.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(torch.tensor(a_log).log())
    report = probe_isolation(hybrid.to(torch.bfloat16), packed((40, 24, 30), slots=100))
    assert "recurrence" in report.leaks
    assert report.output_change > 1e-2  # far above what rounding does to log-probabilities of about 4


def test_v02_a_convolution_with_as_many_channels_as_the_row_has_slots_is_named_too(hybrid, monkeypatch):
    convolution = next(layer for layer in hybrid.modules() if isinstance(layer, torch.nn.Conv1d))
    slots = convolution.in_channels
    leaky(monkeypatch, "causal_conv1d_fn")
    assert probe_isolation(hybrid, packed((slots // 2, slots - slots // 2), slots=slots)).leaks == ("convolution",)


@pytest.mark.parametrize("lengths", [(40, 24), (24, 40), (60, 2), (40, 24, 1), (30, 1, 1, 8)])
def test_v04_the_first_document_is_never_the_one_under_test_for_nothing_can_reach_it(hybrid, monkeypatch, lengths):
    leaky(monkeypatch, "torch_chunk_gated_delta_rule")
    report = probe_isolation(hybrid, packed(lengths, slots=sum(lengths)))
    assert report.probed_document > 0
    assert "recurrence" in report.leaks


def test_a_row_whose_only_long_document_is_the_first_proves_nothing(hybrid):
    with pytest.raises(IsolationError, match="cannot be proven"):
        assert_isolation(hybrid, packed((9, 1, 1), slots=11))


def test_v01_position_ids_alone_do_not_keep_a_hybrid_apart(hybrid):
    batch = packed((7, 9), slots=16, cu_seq_lens_q=None, cu_seq_lens_k=None, seq_idx=None, chunk_indices=None)
    report = probe_isolation(hybrid, batch)
    assert not report.passed
    assert report.leaks == ("convolution", "recurrence")


def test_v06_a_model_that_drops_the_metadata_is_seen(hybrid):
    original = hybrid.model.forward

    def dropping(*args, cu_seq_lens_q=None, cu_seq_lens_k=None, seq_idx=None, **kwargs):
        return original(*args, **kwargs)

    hybrid.model.forward = dropping
    assert probe_isolation(hybrid, packed()).leaks == ("convolution", "recurrence")


def test_v15_positions_that_reset_do_not_isolate_plain_causal_attention():
    from transformers import AttentionInterface

    def plain_causal(module, query, key, value, attention_mask, scaling=None, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2), None

    AttentionInterface.register("plain_causal_for_this_test", plain_causal)
    model = tiny_llama()
    model.set_attn_implementation("plain_causal_for_this_test")
    with pytest.raises(IsolationError, match="through attention") as refused:
        assert_isolation(model, packed())
    assert refused.value.mend.startswith('attn_implementation="sdpa"')


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_v07_masked_attention_is_isolated_when_positions_are_there(implementation):
    model = tiny_llama()
    model.set_attn_implementation(implementation)
    assert assert_isolation(model, packed()).passed
    with pytest.raises(PackingError, match="lacks position_ids"):
        assert_isolation(model, packed(position_ids=None))


def test_the_probe_leaves_no_trace(hybrid):
    before = copy.deepcopy(hybrid.state_dict())
    random_state = torch.get_rng_state()
    hybrid.train()
    assert_isolation(hybrid, packed())
    assert all(torch.equal(value, before[name]) for name, value in hybrid.state_dict().items())
    assert all(parameter.grad is None for parameter in hybrid.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert hybrid.training
    assert not any(layer._forward_hooks for layer in hybrid.modules())


def test_the_decay_is_restored_when_the_model_fails(hybrid):
    before = copy.deepcopy(hybrid.state_dict())
    hybrid.lm_head.forward = None
    with pytest.raises(TypeError):
        probe_isolation(hybrid, packed())
    assert all(torch.equal(value, before[name]) for name, value in hybrid.state_dict().items())


def test_a_dead_model_proves_nothing(hybrid):
    with torch.no_grad():
        hybrid.lm_head.weight.zero_()
    with pytest.raises(IsolationError, match="could not tell"):
        assert_isolation(hybrid, packed())


def test_a_model_that_gives_nan_does_not_pass(hybrid):
    with torch.no_grad():
        hybrid.lm_head.weight.fill_(float("nan"))
    with pytest.raises(IsolationError, match="are not finite"):
        assert_isolation(hybrid, packed())


def test_a_gradient_that_is_nan_where_no_loss_comes_from_is_no_leak_by_name(hybrid):
    """Gemma 3n's: a root's slope of infinity times the nothing that comes back from other documents."""

    def with_a_root(_, args):
        nothing = (args[0] - args[0])[:, -3:].sqrt()
        return torch.cat((args[0][:, :-3], args[0][:, -3:] + nothing), 1), *args[1:]

    hybrid.model.layers[0].register_forward_pre_hook(with_a_root)
    with pytest.raises(IsolationError, match=r"(?s)are not finite.*at other documents' inf.*packing=False"):
        assert_isolation(hybrid, packed())


def test_v12_positions_that_count_the_row_are_seen_where_documents_are_kept_apart():
    """Learned positions of the row's slots: no document sees another, and each is trained at places it never has."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, use_cache=False)).train()
    assert assert_isolation(model, packed()).placement_change < 1e-5
    assert all(module.training for module in model.modules())
    positions = model.transformer.wpe
    learned = positions.forward
    positions.forward = lambda given: learned(torch.arange(given.shape[-1])[None])
    with pytest.raises(IsolationError, match="depend on where in the row it lies"):
        assert_isolation(model, packed())
    layers = model.transformer  # as accelerate wraps a model: weights stay fp32, products do not
    forward = layers.forward
    layers.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    assert probe_isolation(model, packed()).placement_change is None  # rounding would hide it
    layers.forward = forward
    assert probe_isolation(model.to(torch.bfloat16), packed()).placement_change is None


def test_one_document_alone_proves_nothing(hybrid):
    with pytest.raises(IsolationError, match="row of 1 document"):
        assert_isolation(hybrid, packed((16,), slots=16))


def test_gradient_checkpointing_and_frozen_embeddings_are_probed_too(hybrid):
    hybrid.train()
    hybrid.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    hybrid.get_input_embeddings().weight.requires_grad_(False)
    assert assert_isolation(hybrid, packed()).passed


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its layers"])
def test_a_compiled_model_is_probed(hybrid, monkeypatch, whole):
    """Tracing through the operations' probe fails inside dynamo."""
    if not whole:
        for layer in hybrid.model.layers:
            layer.compile(backend="eager")
    model = torch.compile(hybrid, backend="eager") if whole else hybrid
    assert assert_isolation(model, packed()).operations == ("convolution", "recurrence", "attention")
    leaky(monkeypatch, "torch_chunk_gated_delta_rule")
    with pytest.raises(IsolationError, match="through recurrence"):
        assert_isolation(model, packed())


def test_dropout_does_not_look_like_a_leak():
    model = tiny_llama()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation("eager")
    model.train()
    assert assert_isolation(model, packed()).passed


def test_trls_fused_head_is_probed_through_the_call_that_trains(hybrid):
    from trl.trainer.utils import add_fused_lm_head

    plain = probe_isolation(hybrid, packed())
    add_fused_lm_head(hybrid)
    calls = []
    hybrid.model.register_forward_hook(lambda *_: calls.append(1))
    fused = assert_isolation(hybrid, packed())
    assert fused.passed
    assert fused.own_gradient == pytest.approx(plain.own_gradient, rel=1e-4)
    assert len(calls) == 4  # two of them to move the document


def test_the_reference_is_what_was_bound(hybrid):
    assert vars(sys.modules[MODELING])["causal_conv1d_fn"].__module__.startswith("hf_speedkit")
    assert reference.causal_conv1d_fn is not None
