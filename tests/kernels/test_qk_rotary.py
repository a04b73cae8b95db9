"""Norm and rotation of attention's heads in one pass: right in value and gradient, and only where that is proven."""

import functools
import logging
from types import FunctionType

import pytest
import torch
from kernel_models import packed_row, random_documents, summed_loss, tiny_model
from rotary_models import fused, loss_and_gradients, small
from transformers import DynamicCache
from transformers.models.qwen3 import modeling_qwen3

from hf_speedkit.kernels import output_gate
from hf_speedkit.kernels.attention import register
from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.fused_attention import attention_forward, why_not_fused
from hf_speedkit.kernels.fused_layers import fused_layer_checks, fused_layers
from hf_speedkit.kernels.qk_rotary import HeadNorms, norm_and_rotate
from hf_speedkit.kernels.saved_tensors import NormAndRotate, OutputGate

EPS = 1e-6
FLOATS, HALVES = torch.float32, torch.bfloat16


def as_transformers_does(queries, keys, norms, cos, sin):
    """What Qwen3.5 and Qwen3 compute, from their formulas."""
    head_dim, turning = norms.query_weight.shape[0], cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]

    def heads(x, weight, eps):
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        one_plus = (normal * (1 + weight.float())).type_as(x)
        x = (one_plus if norms.one_plus else weight * normal.to(x.dtype)).transpose(1, 2)
        first, second = x[..., :turning].chunk(2, dim=-1)
        turned = x[..., :turning] * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turned, x[..., turning:]), dim=-1)

    gate = queries[..., head_dim:] if queries.shape[-1] > head_dim else None
    queries = heads(queries[..., :head_dim], norms.query_weight, norms.query_eps)
    return queries, heads(keys, norms.key_weight, norms.key_eps), gate


@pytest.mark.parametrize("one_plus", [True, False])
@pytest.mark.parametrize(
    ("heads", "sizes", "gated"), [((6, 2), (16, 4), True), ((2, 2), (24, 24), False)], ids=["partial", "full"]
)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "table_dtype"),
    [(FLOATS, FLOATS, FLOATS), (HALVES, HALVES, HALVES), (HALVES, FLOATS, FLOATS)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_values_gradients_dtypes_and_order_in_memory(one_plus, heads, sizes, gated, dtype, weight_dtype, table_dtype):
    make = torch.Generator().manual_seed(0)

    def random(*shape, dtype=dtype):
        return torch.randn(shape, generator=make).to(dtype)

    (batch, slots), (head_dim, turning) = (2, 5), sizes
    queries = random(batch, slots, heads[0], head_dim * (2 if gated else 1))
    leaves = [queries, random(batch, slots, heads[1], head_dim), *(random(head_dim, dtype=weight_dtype) for _ in "qk")]
    tables = [random(1, slots, turning, dtype=table_dtype) for _ in "cs"]
    incoming = [random(batch, count, slots, head_dim) for count in heads] + [random(batch, slots, heads[0], head_dim)]

    def run(function, cast=lambda x: x):
        own = [cast(leaf).clone().requires_grad_() for leaf in leaves]
        norms = HeadNorms(query_weight=own[2], key_weight=own[3], query_eps=EPS, key_eps=2 * EPS, one_plus=one_plus)
        outputs = [output for output in function(*own[:2], norms, *map(cast, tables)) if output is not None]
        grads = [grad.to(output.dtype) for grad, output in zip(incoming, outputs, strict=False)]
        return [*outputs, *torch.autograd.grad(outputs, own, grads)]

    found, theirs = run(norm_and_rotate), run(as_transformers_does)
    exact = run(as_transformers_does, lambda x: x.double())
    for mine, own, right in zip(found, theirs, exact, strict=True):
        assert mine.dtype == own.dtype
        # Three roundings to bfloat16, of 2^-9 each; float32 sums of 24 terms.
        assert (mine - right).norm() <= (6e-3 if dtype == HALVES else 1e-6) * right.norm()
    assert all(output.transpose(1, 2).is_contiguous() for output in found[:2])


@pytest.mark.parametrize("dtype", [FLOATS, HALVES])
def test_the_output_gate_in_value_and_gradient(dtype):
    make = torch.Generator().manual_seed(0)
    output, wide = (torch.randn(2, 5, 3, size, generator=make).to(dtype) for size in (8, 16))
    grad = torch.randn(2, 3, 5, 8, generator=make).to(dtype).transpose(1, 2)
    gate = wide[..., 8:]

    def run(function, *leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        product = function(*leaves)
        return [product, *torch.autograd.grad(product, leaves, grad.to(product.dtype))]

    found = run(output_gate.gated, output, gate)
    right = run(lambda x, g: x * g.sigmoid(), output.double(), gate.double())
    for mine, value in zip(found, right, strict=True):
        assert mine.dtype == dtype
        assert (mine - value).norm() <= (3e-3 if dtype == HALVES else 1e-6) * value.norm()


@pytest.mark.parametrize("attention", ["sdpa", "eager", register()])
@pytest.mark.parametrize("family", ["qwen3_5", "Qwen3"])
def test_losses_and_all_gradients_of_a_model_stay(family, attention):
    model = small(family)
    model.set_attn_implementation(attention)
    loss, before = loss_and_gradients(model)
    with fused(model) as lines:
        (check,) = fused_layer_checks(model)
        fused_loss, after = loss_and_gradients(model)
    assert len(lines) == 1
    assert (check.function, check.layers, check.layers_total) == ("qk_rotary", 2, 2)
    torch.testing.assert_close(fused_loss, loss)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5 * float(before.abs().max()))
    assert loss_and_gradients(model)[0] == loss


@pytest.mark.parametrize("family", ["qwen3_5", "Qwen3"])
def test_with_a_cache_the_layers_own_forward_runs(family):
    model = small(family).eval()
    (document,) = random_documents([6])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(document[None], **settings)
    with fused(model), torch.no_grad():
        assert torch.equal(model.generate(document[None], **settings), wanted)
        cache = model(document[None], use_cache=True).past_key_values
    assert cache.get_seq_length() == 6


def test_a_hook_that_comes_later_on_a_norm_is_called():
    """To look at it, or to gather its weight, which DeepSpeed's third stage empties outside of the call."""
    model = small("Qwen3")
    loss, _ = loss_and_gradients(model)
    seen = []
    with fused(model):
        for layer in model.model.layers:
            layer.self_attn.k_norm.register_forward_pre_hook(lambda norm, _: seen.append(norm))
        assert loss_and_gradients(model)[0] == loss
    assert len(seen) == 2


ROWS = torch.ones(1, 5, 16)


@pytest.mark.parametrize(
    "tables",
    [
        (ROWS[:, None], ROWS[:, None]),
        [ROWS, ROWS],
        (ROWS, ROWS, ROWS),
        (ROWS, torch.ones(1, 5, 16, requires_grad=True)),
        (torch.ones(1, 9, 16), torch.ones(1, 9, 16)),
        (torch.ones(1, 5, 20), torch.ones(1, 5, 20)),
        None,
    ],
    ids=["dimensions", "list", "three", "trained", "slots", "columns", "none"],
)
def test_positions_in_another_form_go_to_the_layers_own_forward(monkeypatch, tables):
    layer = small("Qwen3").model.layers[0].self_attn
    called = []
    monkeypatch.setattr(type(layer), "forward", lambda self, *args, **kwargs: called.append((args, kwargs)))
    attention_forward(one_plus=False)(layer, torch.zeros(1, 5, 32), tables, position_ids=3)
    ((_, given, mask), named) = called[0]
    assert given is tables
    assert mask is None
    assert named == {"position_ids": 3}


Qwen3Attention = type(small("Qwen3").model.layers[0].self_attn)


def renamed(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
    """As of transformers 5.24, where what was past_key_values is called cache."""
    return Qwen3Attention.forward(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)


def test_a_cache_by_either_name_and_in_its_place_goes_to_the_layers_own_forward(monkeypatch):
    model, seen = small("Qwen3"), []
    model.set_attn_implementation("eager")
    layer = model.model.layers[0].self_attn
    own = FunctionType(renamed.__code__, vars(modeling_qwen3), argdefs=(None,))
    layer.__class__ = type("Renamed", (Qwen3Attention,), {"forward": own})
    assert why_not_fused(layer) is None
    attend, forward = modeling_qwen3.eager_attention_forward, attention_forward(one_plus=False)

    def look(module, query, key, *others, **named):
        seen.append((key.shape[2], sorted(named)))
        return attend(module, query, key, *others, **named)

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", look)
    arguments = torch.randn(1, 5, 32), (torch.ones(1, 5, 16), torch.zeros(1, 5, 16)), None
    cache, usual = DynamicCache(config=model.config), ["dropout", "scaling", "sliding_window"]
    forward(layer, *arguments, cache=cache)
    forward(layer, *arguments, cache)
    forward(layer, *arguments, cache=None)
    assert seen == [(5, usual), (10, usual), (5, usual)]


class OfTwoSequences(Qwen3Attention):
    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, others=None, **kwargs
    ):
        others = hidden_states if others is None else others
        return super().forward(hidden_states + others, position_embeddings, attention_mask, past_key_values, **kwargs)


class MaskFirst(Qwen3Attention):
    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, past_key_values=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfTwoSequences, "attention_mask, past_key_values, others, kwargs"),
        (MaskFirst, "its forward takes hidden_states, attention_mask, position_embeddings"),
    ],
)
def test_a_layer_that_takes_something_else_stays(caplog, kind, reason):
    caplog.set_level(logging.INFO)
    model = small("Qwen3").eval()
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    with fused(model) as lines:
        assert lines == ()
    assert reason in caplog.text


def test_a_layer_that_drops_other_weights_of_attention_stays(monkeypatch, caplog):
    """Before the first step a model is in evaluation mode, where nobody drops any."""
    own = Qwen3Attention.forward

    def without_dropout(self, *args, **kwargs):
        self.training = False
        output = own(self, *args, **kwargs)
        self.training = True
        return output

    monkeypatch.setattr(Qwen3Attention, "forward", functools.wraps(own)(without_dropout))
    with fused(small("Qwen3").eval()) as lines:
        assert lines == ()
    assert "it hands attention dropout=0.125, the layer dropout=0.0" in caplog.text


def test_a_layer_that_decides_by_its_place_in_a_list_of_the_config_is_compared_apart(monkeypatch):
    own = Qwen3Attention.forward

    def forward(self, hidden_states, position_embeddings, *args, **kwargs):
        turns = self.config.rotates[self.layer_idx]
        cos, sin = position_embeddings
        return own(self, hidden_states, (cos * turns + (1 - turns), sin * turns), *args, **kwargs)

    monkeypatch.setattr(Qwen3Attention, "forward", functools.wraps(own)(forward))
    model = small("Qwen3")
    model.config.rotates = [1, 0]
    with fused(model):
        assert ["forward" in vars(layer.self_attn) for layer in model.model.layers] == [True, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own look at its inputs
def test_compiled_layers_run_their_own_forward():
    """What was proven is not what a compiler makes of it, and dynamo cannot follow either forward in one graph."""
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = tiny_model("qwen3_5", **config)
    with bind_references(model):
        loss, before = loss_and_gradients(model)
        with fused_layers(model, devices=("cpu",), tokens_per_batch=50) as lines:
            for layer in model.model.layers:
                layer.compile(backend="eager", fullgraph=True)
            fused_loss, after = loss_and_gradients(model)
    assert len(lines) == 2
    assert fused_loss == loss
    assert torch.equal(after, before)


def test_a_second_derivative_is_refused_instead_of_wrong():
    model = small("qwen3_5")
    model.set_attn_implementation("eager")
    with fused(model):
        inputs, labels = packed_row(random_documents([9]))
        weight = model.model.embed_tokens.weight
        (gradient,) = torch.autograd.grad(summed_loss(model, inputs, labels), [weight], create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


def test_rows_beyond_32_bits_go_to_the_layers_own_forward(monkeypatch):
    layer = small("Qwen3").model.layers[0].self_attn
    called = []
    monkeypatch.setattr(type(layer), "forward", lambda self, *args, **kwargs: called.append(args))
    row = torch.empty(1, 2**26, 32, device="meta")
    tables = (torch.empty(1, 2**26, 16, device="meta"),) * 2
    attention_forward(one_plus=False)(layer, row, tables)
    assert called


def test_a_layer_that_holds_some_of_the_heads_runs():
    """Split over GPUs: the config and out_features still name all of them (transformers' tensor parallelism)."""
    layer = small("Qwen3").model.layers[0].self_attn
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight[16:])
    layer.o_proj.weight = torch.nn.Parameter(layer.o_proj.weight[:, 16:])
    layer.num_key_value_groups = 1
    inputs = torch.randn(2, 5, 32), (torch.rand(2, 5, 16), torch.rand(2, 5, 16)), None
    torch.testing.assert_close(attention_forward(one_plus=False)(layer, *inputs)[0], layer(*inputs)[0])


def test_the_memory_trace_saves_what_the_real_functions_save():
    def saved(run):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append((x.shape, x.dtype)) or x, lambda x: x):
            run()
        return sizes

    leaves = [torch.ones(1, 5, 3, 8), torch.ones(1, 5, 1, 4), torch.ones(4), torch.ones(4)]
    queries, keys, *weights = (leaf.requires_grad_() for leaf in leaves)
    norms = HeadNorms(query_weight=weights[0], key_weight=weights[1], query_eps=EPS, key_eps=EPS, one_plus=True)
    tables = torch.ones(1, 5, 2), torch.ones(1, 5, 2)
    real = saved(lambda: norm_and_rotate(queries, keys, norms, *tables))
    traced = saved(lambda: NormAndRotate.apply(queries, keys, *weights))
    # The tables are one pair for all layers.
    assert [entry for entry in real if entry[0] != (5, 2)] == traced
    assert saved(lambda: output_gate.gated(queries, queries)) == saved(lambda: OutputGate.apply(queries, queries))
