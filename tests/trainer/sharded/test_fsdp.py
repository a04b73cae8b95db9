"""FSDP2 on two gloo processes, really sharded: against one process, and what the preflight says and corrects.

accelerate ignores FSDP on a CPU, so the runs set its private state (two_process_run.shard_on_cpu).
"""

import json
import socket
import time
import weakref
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from fsdp_run import (
    LOOKED_AT,
    STEPS,
    Forwards,
    lone_head,
    losses,
    rank_main,
    refused,
    trained,
    with_activations_on_the_host,
)
from rank_processes import start_ranks
from support import tiny_hybrid, tiny_llama
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from zero_copy_run import Tower

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.sharded.ahead import reentrant as reason_to_wait
from hf_speedkit.trainer.sharded.communication import _one_memory, corrected_gathers
from hf_speedkit.trainer.sharded.gradient_memory import ReduceScatterInOneMemory
from hf_speedkit.trainer.sharded.preflight import (
    check_wrap_class,
    refuse_offload_without_host_group,
    refuse_sharded_four_bits,
)
from hf_speedkit.trainer.sharded.prepared import loaded_weights, peak_host_growth
from hf_speedkit.trainer.sharded.units import decoder_layers

two = pytest.mark.two_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory, worker_id):
    """The runs' results; made once, also where xdist spreads this file over its workers."""
    base = tmp_path_factory.getbasetemp()
    path = (base if worker_id == "master" else base.parent) / "fsdp"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.mkdir()
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            began = time.monotonic()
            start_ranks(rank_main, port, str(path))
            assert time.monotonic() - began < 200
    return path


@pytest.fixture(scope="module")
def ranks(folder):
    said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert "error" not in said[0], said[0]
    assert "error" not in said[1], said[1]
    return said


def assert_same_gradients(sharded, whole):
    assert sharded.keys() == whole.keys()
    for step, gradients in whole.items():
        for name, gradient in gradients.items():
            # facts of this comparison: 2e-7 at most over 20 steps in fp32
            torch.testing.assert_close(sharded[step][name], gradient, atol=1e-5, rtol=0, msg=f"step {step}, {name}")


@two
def test_twenty_sharded_steps_equal_one_process_in_loss_and_gradients(folder, ranks, tmp_path):
    alone, gradients = trained(tmp_path, LOOKED_AT, accumulation=2, max_steps=STEPS, lr_scheduler_type="constant")
    assert len(losses(alone)) == STEPS
    for said in ranks:
        assert said["losses"] == pytest.approx(losses(alone), abs=1e-5)
    assert_same_gradients(torch.load(folder / "whole.pt"), gradients)


@two
def test_accelerate_shards_every_layer_the_embedding_and_norm_with_head(ranks):
    layers = [f"model.layers.{i}" for i in range(4)]
    assert ranks[0]["groups"] == ["model.embed_tokens", *layers, "model.norm + lm_head"]
    assert ranks[0]["quiet"] == {}, "nothing to say about a job as it should be"


@two
def test_a_head_alone_in_its_group_gets_the_mean_gradient_of_all_ranks(folder, ranks, tmp_path):
    assert ranks[0]["alone groups"][-1] == "lm_head"
    _, gradients = trained(tmp_path, (1,), accumulation=2, max_steps=1, model=lone_head())
    assert_same_gradients(torch.load(folder / "alone.pt"), gradients)


@two
def test_the_embedding_is_gathered_once_a_step(ranks):
    gathers, forward_passes = ranks[0]["embedding"]
    assert gathers == forward_passes >= 2, "two steps and what start-up proves: no gather for the backward passes"


@two
def test_what_was_gathered_last_is_held_twice_at_the_head_with_torchs_copies_only_as_the_memory_plan_counts(ranks):
    for name in ("flat", "alone flat"):  # norm and head; where the head is gathered apart, the last layer
        (*_, at_head, behind_forward), last_gathered = ranks[0][name]
        assert at_head == last_gathered > 0
        assert behind_forward == 0
    assert set(ranks[0]["direct flat"]) == {0}


@two
def test_v37_accumulated_gradients_are_named_with_bytes_and_setting_and_train_the_same(ranks, tmp_path):
    assert ranks[0]["kept"].keys() == {"kept_gradients"}
    assert "while 2 micro-batches accumulate" in ranks[0]["kept"]["kept_gradients"]
    alone, _ = trained(tmp_path, accumulation=4, max_steps=2)
    assert ranks[1]["kept losses"] == pytest.approx(losses(alone), abs=1e-5)  # with layers prefetched, too


@two
def test_v34_a_slow_rank_and_rows_without_targets_hold_nobody_up(ranks):
    assert len(ranks[0]["masked"]) == 6
    assert ranks[0]["masked"] == ranks[1]["masked"]


@two
def test_v34_a_rank_with_a_document_of_another_length_stops_both_before_step_1(ranks):
    for said in ranks:
        assert said["other rows"].startswith(
            "PackingError: 1 of 2 ranks have other documents than rank 0 in the training data"
        )


@two
def test_v38_weights_upcast_by_accelerate_are_named_and_follow_small_updates(ranks):
    assert ranks[0]["upcast dtype"] == "torch.float32"
    assert "loaded in bfloat16 and are held in float32" in ranks[0]["upcast"]["upcast"]
    assert ranks[0]["upcast moves"] is True, "SGD at 1e-5: in bf16 nothing would move"


@two
def test_v39_a_group_of_two_dtypes_is_refused_on_all_ranks_with_the_parameter(ranks):
    for said in ranks:
        assert said["mixed"].startswith("ConfigurationError: 1 of 6 FSDP2 groups")
        assert "such as model.layers.1.input_layernorm.weight" in said["mixed"]


@two
def test_v43_decay_parameters_that_fsdp_rounds_are_named(ranks):
    assert (
        "A_log and dt_bias of 3 recurrent layers are used in bfloat16 (held in float32"
        in (ranks[0]["upcast"]["rounded_decay"])
    )


@two
def test_v44_two_activation_checkpointings_are_refused_and_one_recomputes_once(ranks):
    assert ranks[0]["forwards"] == 2
    for said in ranks:
        assert said["twice"].startswith("ConfigurationError: 4 layers have two activation checkpointings")


@two
@pytest.mark.parametrize("name", ["host", "host, wrapped"])
def test_activations_on_the_host_leave_losses_as_they_are_and_gathered_weights_alone(ranks, tmp_path, name):
    """A layer has nine matrices; gathered ones that were copied would be so many storages more than without FSDP."""
    alone = with_activations_on_the_host(tmp_path, activation_checkpointing=True)
    for said in ranks:
        found, counts = said[name]
        assert found == pytest.approx(said["losses"][:3], abs=1e-6)
        for ours, whole in zip(counts, alone[1], strict=True):
            # Rows differ, and with them what is above the smallest size that is moved.
            assert all(abs(a - b) <= 3 for a, b in zip(ours, whole, strict=True)), (ours, whole)
    assert min(map(min, alone[1])) > 5


@two
def test_kept_products_leave_losses_as_they_are_also_in_a_second_training(ranks, tmp_path):
    alone, _ = trained(tmp_path, accumulation=2, max_steps=3, lr_scheduler_type="constant")
    alone.train()
    for said in ranks:
        once, again = said["products"]
        assert once == [pytest.approx(said["losses"][:3], abs=1e-6), 4]
        assert again == [pytest.approx(losses(alone), abs=1e-5), 4]


@two
def test_a_model_sharded_as_one_unit_is_named(ranks):
    assert "4 layers are gathered together" in ranks[0]["one unit"]["several_layers_in_a_group"]


@two
def test_torch_before_2_13_trains_on_after_an_evaluation_and_a_checkpoint(ranks):
    for said in ranks:
        assert said["older torch"] == pytest.approx(said["losses"][:3], abs=1e-5)


def test_v42_the_whole_config_says_whether_weights_are_tied_where_that_of_the_text_does_not():
    """Qwen2.5-VL's: every training ended in an AttributeError."""
    from types import SimpleNamespace

    from hf_speedkit.trainer.sharded.prepared import _tie

    model = tiny_llama()
    text = SimpleNamespace()
    model.config = SimpleNamespace(tie_word_embeddings=True, get_text_config=lambda: text)
    assert _tie(model) == (True, False)
    text.tie_word_embeddings = False
    assert _tie(model) == (False, False)


def test_v42_untied_weights_are_refused_and_tied_ones_pass(tmp_path):
    model = tiny_hybrid(tie_word_embeddings=True)
    assert refused(tmp_path / "tied", model=model, max_steps=1, isolation_check=False) is None
    model = tiny_hybrid(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    said = refused(tmp_path / "untied", model=model, max_steps=1)
    assert said.startswith("ConfigurationError")
    assert "they are two tensors" in said


@pytest.mark.parametrize(("reentrant", "forwards"), [(False, 2), (True, 3)])
def test_v44_doubled_checkpointing_runs_a_layer_three_times_where_one_is_reentrant(reentrant, forwards):
    """What the refusal is for: a wrapped layer that checkpoints itself as well."""
    model, counted = tiny_hybrid(layers=1), Forwards()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    model.model.layers[0].mlp.register_forward_pre_hook(counted.add)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    row = torch.arange(2, 18)[None]
    model(input_ids=row, labels=row).loss.backward()
    assert counted.count == forwards


def plugin(*names):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=list(names) or None
    )


def test_a_wrap_class_that_the_model_lacks_is_refused_with_the_right_one():
    with pytest.raises(ConfigurationError, match="LlamaDecoderLayer, and the model has no such module") as refusal:
        check_wrap_class(tiny_hybrid(), plugin("LlamaDecoderLayer"))
    assert refusal.value.mend == "fsdp_config: transformer_layer_cls_to_wrap: Qwen3_5DecoderLayer"
    with pytest.raises(ConfigurationError, match="the model itself"):
        check_wrap_class(tiny_hybrid(), plugin())  # its list names a vision block
    check_wrap_class(tiny_hybrid(), plugin("Qwen3_5DecoderLayer"))
    check_wrap_class(tiny_llama(), plugin())
    check_wrap_class(tiny_llama(), None)


@pytest.mark.parametrize(("dtype", "version", "refused"), [("bfloat16", 2, 1), ("uint8", 2, 0), ("bfloat16", 1, 0)])
def test_four_bit_weights_that_fsdp2_would_cut_are_refused_and_others_pass(dtype, version, refused):
    class Params4bit(torch.nn.Parameter):
        """As bitsandbytes calls them."""

    model = tiny_llama()
    packed = torch.zeros(8, 1, dtype=getattr(torch, dtype))
    model.model.layers[0].mlp.up_proj.weight = Params4bit(packed, requires_grad=False)
    if not refused:
        refuse_sharded_four_bits(model, SimpleNamespace(fsdp_version=version))
        return
    with pytest.raises(ConfigurationError, match="leave bnb_4bit_quant_storage out"):
        refuse_sharded_four_bits(model, SimpleNamespace(fsdp_version=version))


@pytest.mark.parametrize(
    ("policy", "backends", "refused"),
    [
        (CPUOffloadPolicy(), "cuda:nccl", 1),
        (CPUOffloadPolicy(), "cpu:gloo,cuda:nccl", 0),
        (CPUOffloadPolicy(), "", 0),
        (OffloadPolicy(), "cuda:nccl", 0),
    ],
    ids=["offloads", "with gloo", "one process", "stays"],
)
def test_weights_on_the_host_need_a_group_that_exchanges_what_lies_there(policy, backends, refused):
    if not refused:
        refuse_offload_without_host_group(SimpleNamespace(cpu_offload=policy), backends)
        return
    with pytest.raises(ConfigurationError, match="FSDP_OFFLOAD_PARAMS=true before the job starts"):
        refuse_offload_without_host_group(SimpleNamespace(cpu_offload=policy), backends)


def test_fewer_than_one_layer_ahead_is_refused():
    with pytest.raises(ConfigurationError, match="fsdp_prefetch_layers=0"), corrected_gathers(None, prefetch_layers=0):
        pass


def test_a_model_that_is_not_sharded_is_left_as_it_is():
    model = tiny_llama()
    with corrected_gathers(model) as changed:
        assert changed == ()
    assert not model._forward_hooks


def test_gradients_are_allocated_on_the_training_stream_and_held_until_the_next_forward_pass(monkeypatch):
    class Stream:
        waited_for = ()

        def wait_stream(self, other):
            self.waited_for = (*self.waited_for, other)

    training, reducing = Stream(), Stream()
    now = [training]

    @contextmanager
    def stream(which):
        now.append(which)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    on = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **_: (on.append(now[-1]), empty(*size))[1])
    one = ReduceScatterInOneMemory(torch.device("cuda"))
    given = {"dtype": torch.float32, "device": torch.device("cuda")}
    inputs = weakref.ref(one.allocate((8,), **given))
    with stream(reducing):
        result = weakref.ref(one.allocate((4,), **given))
    assert on == [training, training]
    assert reducing.waited_for == (training,)
    assert inputs() is None  # whole gradients are not held, their sums are
    assert result().shape == (4,)
    one.release()
    assert result() is None
    one.close()
    with stream(reducing):
        one.allocate((4,), **given)
    assert on[-1] is reducing


@pytest.mark.parametrize(("backward_passes", "shared"), [(1, True), (2, False)])
def test_gradients_that_add_up_over_micro_batches_stay_where_torch_puts_them(backward_passes, shared):
    class Sharded(FSDPModule, torch.nn.Linear):
        def __new__(cls, *_):
            return torch.nn.Linear.__new__(cls)

        def _get_fsdp_state(self):
            return SimpleNamespace(_fsdp_param_groups=[])

        def set_custom_reduce_scatter(self, comm):
            self.comm = comm

    model, memory = Sharded(2, 2), ReduceScatterInOneMemory(torch.device("cpu"))
    with ExitStack() as stack:
        assert (_one_memory(model, memory, backward_passes, stack) is not None) is shared
        assert hasattr(model, "comm") is shared
        assert bool(model._forward_pre_hooks) is shared
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_keeps_torchs_copies(reentrant):
    model = tiny_llama()
    assert reason_to_wait(model) is None
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert (reason_to_wait(model) is not None) is reentrant
    model.activation_checkpointing_disable()  # as for another training of the same model
    assert reason_to_wait(model) is None


@pytest.mark.parametrize("vision", [2, 3, 5])
def test_the_layers_of_a_vision_tower_are_not_taken_for_the_decoders(vision):
    tower = Tower(vision=vision)
    assert decoder_layers(tower) == list(tower.base_model.layers)
    assert decoder_layers(tower.visual[0]) == []


def test_v41_the_host_memory_a_process_once_held_is_read(tmp_path):
    status = tmp_path / "status"
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB, still there: it belongs to what was loaded
    status.write_text("Name:\tpython\nVmHWM:\t  409600 kB\nVmRSS:\t  204800 kB\n")
    assert peak_host_growth(model, status) == 200 * 2**20 + 4 * 2**20
    assert peak_host_growth(model, tmp_path / "none") == 0
    # The real one: 200 MB taken and given back, whatever this process held and gave back before.
    block = torch.ones(50_000_000)
    del block
    assert peak_host_growth(model) > 150e6


def test_weights_are_noted_before_they_are_prepared():
    model = tiny_llama().bfloat16()
    model.lm_head.weight.requires_grad_(False)
    noted = loaded_weights(model)
    frozen = model.lm_head.weight.numel() * 2
    assert (noted.dtype, noted.total_bytes - noted.trained_bytes) == ("bfloat16", frozen)
    assert loaded_weights(model.to("meta")) == noted
