"""One convolution each for q, k and v: the numbers stay, the copies go, and what does not fit keeps its own forward."""

import functools

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from kernel_models import gradients, packed_row, random_documents, summed_loss, tiny_model

from hf_speedkit.kernels.bindings import bind_references
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.fused_parity import COMPARED_ROWS
from hf_speedkit.kernels.gated_delta_forward import is_gated_delta_net, split_forward, why_not_split
from hf_speedkit.kernels.gated_delta_parity import _borders, compare_split
from hf_speedkit.kernels.layout import effective_forward
from hf_speedkit.kernels.probe import EDGE_LENGTHS

CPU = torch.device("cpu")
LENGTHS = (3, 70, 5, 40)
FAMILIES = ("qwen3_5", "qwen3_next")


@pytest.fixture(params=FAMILIES)
def model(request):
    """Its functions are bound to our references, as training on a CPU has them."""
    found = tiny_model(request.param)
    with bind_references(found):
        yield found


def split(model):
    return fused_layers(model, exclude=("qk_rotary",), devices=("cpu",))


def layer_of(model):
    return next(module for module in model.modules() if is_gated_delta_net(module))


def watched(monkeypatch, model, name):
    """Arguments of every call of a function that the layers look up by this name."""
    calls, namespace = [], effective_forward(layer_of(model)).__globals__
    function = namespace[name]

    def call(*args, **kwargs):
        calls.append((args, kwargs))
        return function(*args, **kwargs)

    monkeypatch.setitem(namespace, name, call)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_row_gives_the_same_logits_and_gradients_bit_for_bit(model, dtype):
    model.to(dtype)
    inputs, labels = packed_row(random_documents(LENGTHS))
    results = []
    for context in (split, lambda model: fused_layers(model)):  # the second changes nothing on a CPU
        with context(model) as lines:
            logits = model(**inputs).logits
            gradients(model, summed_loss(model, inputs, labels))
            results.append((lines, logits, {name: p.grad for name, p in model.named_parameters()}))
    (lines, logits, found), (nothing, own_logits, wanted) = results
    assert [line.partition(" on ")[2][:2] for line in lines] == ["3 "]
    assert nothing == ()
    assert torch.equal(logits, own_logits)
    for name, value in wanted.items():
        if value is None:  # an expert without tokens
            assert found[name] is None
        elif "conv1d" not in name:
            assert torch.equal(found[name], value), name
        else:  # its sum over positions goes by blocks of channels, whose number changes
            torch.testing.assert_close(found[name], value)


def test_documents_do_not_see_one_another(model):
    documents = random_documents(LENGTHS)
    others = [*random_documents(LENGTHS, seed=2)[:-1], documents[-1]]
    with split(model), torch.no_grad():
        first, second = (model(**packed_row(row)[0]).logits[:, -LENGTHS[-1] :] for row in (documents, others))
    assert torch.equal(first, second)


def test_the_rule_gets_tensors_it_need_not_copy_and_the_convolution_views_of_the_projection(monkeypatch, model):
    layer, inputs, outputs = layer_of(model), packed_row(random_documents(LENGTHS))[0], []
    forward = split_forward(layer)
    rules = watched(monkeypatch, model, "torch_chunk_gated_delta_rule")  # after: functions are looked up at each call
    convolutions = watched(monkeypatch, model, "causal_conv1d_fn")
    layer._modules.get("in_proj_qkv", layer.norm).register_forward_hook(lambda *a: outputs.append(a[2]))
    keys = {name: value for name, value in inputs.items() if name not in ("input_ids", "use_cache", "position_ids")}
    hidden_states = torch.randn(1, sum(LENGTHS), layer.hidden_size)
    forward(layer, hidden_states, cache_params=None, attention_mask=None, **keys)
    ((tensors, options),) = rules
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert options["cu_seqlens"] is inputs["cu_seq_lens_q"]
    assert len(convolutions) == 3
    for _, named in convolutions:
        assert all(named[name] is value for name, value in keys.items())
    if "in_proj_qkv" in layer._modules:
        assert {args[0].data_ptr() for args, _ in convolutions} == {
            outputs[0].data_ptr() + 4 * start for start in (0, layer.key_dim, 2 * layer.key_dim)
        }


def test_gradients_of_the_slices_meet_in_one_cat(monkeypatch):
    model = tiny_model("qwen3_5")
    with bind_references(model):
        layer = layer_of(model)
        outputs = []
        layer.in_proj_qkv.register_forward_hook(lambda *a: outputs.append(a[2]))
        output = split_forward(layer)(layer, torch.randn(1, 9, layer.hidden_size))
    todo, edges = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is not None and (node, following) not in edges:
                edges.add((node, following))
                todo.append(following)
    weights = [below for above, below in edges if getattr(below, "variable", None) is layer.conv1d.weight]
    (squeeze,) = [above for above, below in edges if below in weights]
    for target in (outputs[0].grad_fn, squeeze):
        assert [above.name() for above, below in edges if below is target] == ["SplitWithSizesBackward0"]


def test_generation_and_padded_rows_keep_the_layers_own_forward(monkeypatch, model):
    convolutions = watched(monkeypatch, model, "causal_conv1d_fn")
    (document,) = random_documents([9])
    padded = {"input_ids": torch.stack((document, document)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    padded["attention_mask"][0, :4] = 0
    results = []
    for context in (split, lambda model: fused_layers(model)):
        with context(model), torch.no_grad():
            del convolutions[:]
            tokens = model.generate(document[None], max_new_tokens=4, do_sample=False, pad_token_id=0)
            results.append((tokens, model(**padded, use_cache=False).logits, len(convolutions)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_a_projection_whose_slices_a_kernel_cannot_read_is_copied_once(monkeypatch):
    """causal-conv1d loads 16 bytes at a time: a view at an odd place would be a misaligned address."""
    model = tiny_model("qwen3_5")
    with bind_references(model):
        layer = layer_of(model)
        forward = split_forward(layer)
        convolutions = watched(monkeypatch, model, "causal_conv1d_fn")
        layer.in_proj_qkv.register_forward_hook(lambda *a: torch.nn.functional.pad(a[2], (1, 2))[..., 1:-2])
        forward(layer, torch.randn(1, 9, layer.hidden_size))
    assert [args[0].stride()[1:] for args, _ in convolutions] == [(1, 64)] * 3
    assert all(args[0].storage_offset() % 4 == 0 for args, _ in convolutions)


def test_below_hooks_that_load_weights_the_layers_own_forward_runs(monkeypatch, model):
    """transformers fires the hook of the convolution from a decorator of the forward (force_accelerate_hooks)."""
    layer = layer_of(model)
    forward = split_forward(layer)
    convolutions = watched(monkeypatch, model, "causal_conv1d_fn")
    add_hook_to_module(layer.conv1d, ModelHook())
    forward(layer, torch.randn(1, 9, layer.hidden_size))
    assert len(convolutions) == 1


@pytest.mark.parametrize(("slots", "end"), [(8_192, 8_192), (100, sum(EDGE_LENGTHS)), (10**6, COMPARED_ROWS)])
def test_on_a_gpu_the_comparison_runs_at_the_length_of_trainings_row(slots, end):
    assert _borders(slots, torch.device("cuda"))[-1] == end
    assert _borders(slots, CPU)[-1] == sum(EDGE_LENGTHS)


def as_one_document(name):
    """Loses the boundaries of the function that reads them from `name`."""

    def call(right, layer, states, **keys):
        slots = states.shape[1]
        one = {"seq_idx": torch.zeros(1, slots, dtype=torch.int32), "cu_seq_lens_q": torch.tensor([0, slots])}
        return right(layer, states, **{**keys, name: one[name]})

    return call


def swapped(right, layer, states, **keys):
    names = ("head_k_dim", "num_k_heads")
    size = {name: getattr(layer, name) for name in names}
    layer.head_k_dim, layer.num_k_heads = size["num_k_heads"], size["head_k_dim"]
    try:
        return right(layer, states, **keys)
    finally:
        vars(layer).update(size)


WRONG = {
    "no boundaries in the convolution": (as_one_document("seq_idx"), "the output is off by"),
    "no boundaries in the rule": (as_one_document("cu_seq_lens_q"), "the output is off by"),
    "a scale": (lambda right, *args, **keys: 1.01 * right(*args, **keys), "the output is off by 1.0%"),
    "a dtype": (lambda right, *args, **keys: right(*args, **keys).double(), "the output is torch.float64"),
    "a hole": (lambda right, *args, **keys: right(*args, **keys) * float("nan"), "the output is off by nan%"),
    "no gradient": (lambda right, *args, **keys: right(*args, **keys).detach(), "it raises RuntimeError: element 0"),
    "other heads": (swapped, "it raises"),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_a_forward_that_computes_something_else_is_refused(change, reason):
    model = tiny_model("qwen3_5")
    with bind_references(model):
        layer = layer_of(model)
        wrong = functools.partial(change, split_forward(layer))
        parity = compare_split(layer, wrong, slots=4096, device=CPU, dtype=torch.float32)
    assert parity.problem is not None
    assert parity.problem.startswith(reason)


def test_a_class_that_computes_something_else_keeps_its_forward(monkeypatch, caplog):
    model = tiny_model("qwen3_5")
    kind = type(layer_of(model))
    own = kind.forward
    changed = functools.wraps(own)(lambda self, *args, **kwargs: own(self, *args, **kwargs) * 1.01)
    monkeypatch.setattr(kind, "forward", changed)
    with bind_references(model), split(model) as lines:
        assert lines == ()
    assert f"split_convolution of {kind.__name__} from hf_speedkit is left out: the output is off by" in caplog.text


def takes(self, hidden_states, position_embeddings):
    raise AssertionError


def test_what_does_not_fit_keeps_its_forward_with_a_reason(monkeypatch):
    odd = tiny_model("qwen3_5", linear_key_head_dim=6)
    with bind_references(odd):
        assert why_not_split(layer_of(odd)) == "12 and 32 channels are no multiples of 8"
    layer = layer_of(tiny_model("qwen3_5"))
    assert why_not_split(layer) == "its causal_conv1d_fn is bound to torch, for which nothing would be gained"
    monkeypatch.setattr(type(layer), "forward", takes)
    assert why_not_split(layer) == "its forward takes hidden_states, position_embeddings, self"
    layer.conv1d.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert why_not_split(layer) == "its convolution has a weight of [8, 1] in torch.uint8"
    assert not any(is_gated_delta_net(module) for module in tiny_model("olmo_hybrid").modules())
