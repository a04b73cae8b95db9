"""The closed form of a step's memory (core/memory_plan.py) against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_speedkit.core import memory_plan
from hf_speedkit.core.memory import GIB
from hf_speedkit.core.memory_choice import (
    GPU_MEMORY_GIB,
    RESERVE_SHARE,
    Fit,
    choose,
    context_gib,
    fit_of,
    most_unchecked,
    smallest_gpus,
)
from hf_speedkit.core.memory_plan import plan_memory
from hf_speedkit.core.memory_sizes import (
    EIGHT_BIT_ADAMW,
    FP32_MASTER,
    LORA,
    PURE_BF16,
    QLORA,
    LayerMemory,
    MemoryJob,
    ModelMemory,
)
from hf_speedkit.core.memory_words import (
    checkpointing_line,
    choice_line,
    gathering_line,
    gib,
    margin_line,
    size_in_words,
)

M = 10**9
LAYER = LayerMemory(kind="full_attention", parameters=M, trained=M, saved=40 * M, work=60 * M)
MODEL = ModelMemory(
    layers=(LAYER,) * 4, embedding=2 * M, tail=2 * M, head=2 * M, tied=False, hidden=M // 10, tokens=1, hidden_size=1
)
SMALL = replace(MODEL, layers=tuple(replace(LAYER, saved=4 * M, work=5 * M) for _ in range(4)))
ADAPTED = replace(SMALL, layers=tuple(replace(layer, trained=10**6) for layer in SMALL.layers), head_trained=False)
P = 8 * M  # parameters of all of these
TILE = 4096 * 32_768 * 2


def parts(model, setting=PURE_BF16, **job):
    return plan_memory(model, setting, MemoryJob(**job))


def test_on_one_gpu_the_first_layers_backward_is_highest_where_layers_are_large():
    plan = parts(MODEL)
    assert plan.phase == "backward of layer 1"
    assert plan.parts == {
        "weights": 2 * P,
        "gradients": 2 * (3 * M + 2 * M),  # three later layers and the head
        "moments": 4 * P,
        "activations": M // 10,  # the checkpoint of layer 1
        "working set": 60 * M,
        "workspaces": 2 * 32 * 2**20,
    }
    assert plan.allocated == sum(plan.parts.values())


def test_without_checkpointing_everything_saved_is_there_when_the_head_runs_backward():
    plan = parts(replace(MODEL, layers=(replace(LAYER, work=45 * M),) * 4), unchecked=4)
    assert plan.phase == "loss head"
    assert plan.parts["activations"] == M // 10 + 4 * 40 * M
    # fp32 and bf16 gradient of the head's weight, and of one slot's hidden state
    assert plan.parts["loss head"] == 2 * M * 6 + 2


def test_the_two_loss_heads_differ_in_what_they_hold():
    many = replace(SMALL, tokens=8192, hidden_size=1000)  # 2 M entries of 1,000
    states = 8192 * 1000 * 2

    def head(name, model=many, setting=PURE_BF16):
        return plan_memory(
            model, setting, MemoryJob(gpus=64 if model.head_trained else 1, head=name, unchecked=4, zero_copy=False)
        )

    # ours is highest in its forward: what was gathered last is there twice, and the logits are
    assert head("speedkit").parts["loss head"] == 2 * M * 4 + 2 * states + 2**31
    assert head("trl").parts["loss head"] == 2 * M * 6 + 4 * states + TILE
    frozen = replace(ADAPTED, tokens=8192, hidden_size=1000, layers=(replace(ADAPTED.layers[0], work=4 * M),) * 4)
    assert head("speedkit", frozen, LORA).parts["loss head"] == 2 * states + 2**31  # logits, no weight's gradient
    assert head("trl", frozen, LORA).parts["loss head"] == 4 * states + TILE


def test_our_heads_buffer_is_as_large_as_the_plan_takes_it_to_be():
    from hf_speedkit.kernels.loss_head import LOGITS_BYTES

    assert memory_plan.LOGITS_BYTES == LOGITS_BYTES


def test_small_layers_leave_the_peak_to_the_last_gradient_or_the_optimizer_step():
    plan = parts(SMALL)
    assert plan.phase == "gradient of the embedding"
    assert plan.parts["gradients"] == 2 * P
    foreach = replace(PURE_BF16, step_bytes=2.0)
    assert parts(SMALL, foreach).phase == "optimizer step"
    assert parts(SMALL, foreach).parts["gradients"] == 2 * P + 2 * P


def test_fsdp_shards_states_and_adds_what_it_gathers():
    plan = parts(MODEL, gpus=4)
    assert plan.phase == "backward of layer 1"
    assert plan.parts["weights"] == 2 * P / 4
    assert plan.parts["moments"] == 4 * P / 4
    assert plan.parts["gradients"] == 2 * 5 * M / 4
    # its own weights, the embedding gathered again, the input of layer 2's reduce-scatter
    assert plan.parts["gathered"] == 2 * M + 2 * 2 * M + 2 * M


def test_on_many_gpus_the_head_is_highest_and_does_not_shrink():
    few, many = parts(SMALL, gpus=64, zero_copy=False), parts(SMALL, gpus=1024, zero_copy=False)
    assert few.phase == many.phase == "loss head"
    assert few.parts["loss head"] == many.parts["loss head"]
    # as weights, which stay between forward and backward, and as the flat result they were copied out of
    assert few.parts["gathered"] == 2 * (2 * 2 * M)
    assert parts(SMALL, gpus=64).parts["gathered"] == 2 * 2 * M  # without copies once


def test_the_flat_result_of_the_last_gather_is_there_in_the_heads_forward_and_nowhere_else():
    def head_phases(model, setting=PURE_BF16, **job):
        found = memory_plan._phases(model, setting, MemoryJob(**{"zero_copy": False, **job}))
        return [parts["gathered"] for phase, parts in found if phase == "loss head"]

    tied = replace(SMALL, tied=True, tail=0)
    assert head_phases(SMALL, gpus=2) == [2 * (2 * 2 * M), 2 * 2 * M]
    assert head_phases(SMALL, gpus=2, zero_copy=True) == [2 * 2 * M, 2 * 2 * M]
    assert head_phases(SMALL, gpus=16, shards=8) == head_phases(SMALL, gpus=2)
    assert head_phases(tied, gpus=2) == [2 * 2 * M + 2 * M, 2 * 2 * M]  # gathered first of all: the last layer's
    # adapters' head is gathered apart from the forward: the last layer's, of which 4-bit weights are no part
    assert head_phases(ADAPTED, LORA, gpus=2) == [2 * 2 * M + 2 * (M + 10**6), 2 * 2 * M]
    assert head_phases(ADAPTED, QLORA, gpus=2) == [2 * 2 * M + 2 * 10**6, 2 * 2 * M]
    for whole in ({"gpus": 1}, {"gpus": 4, "fsdp": False}, {"gpus": 4, "shards": 1}):
        assert head_phases(SMALL, **whole) == [0, 0]


def test_without_resharding_the_weights_of_all_layers_before_stay():
    backward = parts(MODEL, gpus=4, reshard=False)
    assert backward.allocated > parts(MODEL, gpus=4).allocated
    head = plan_memory(SMALL, PURE_BF16, MemoryJob(gpus=64, reshard=False))
    assert head.parts["gathered"] == 2 * 2 * M + 4 * 2 * M


def test_shards_of_one_host_are_larger_than_those_of_all():
    hybrid = parts(MODEL, gpus=16, shards=8)
    assert hybrid.parts["weights"] == 2 * P / 8

    def at_embedding(**job):
        found = memory_plan._phases(SMALL, PURE_BF16, MemoryJob(**job))
        return next(parts["gathered"] for phase, parts in found if phase == "gradient of the embedding")

    size = 2 * SMALL.embedding
    assert at_embedding(gpus=8) == size / 8
    assert (
        at_embedding(gpus=16, shards=8) == size + size / 8
    )  # gradients of hybrid shards are copied before they are reduced


def test_ddp_copies_everything_and_keeps_a_second_set_of_gradients():
    plan = parts(SMALL, gpus=4, fsdp=False)
    assert plan.parts["weights"] == 2 * P
    assert plan.parts["gradients"] == 2 * 2 * P


def test_v37_accumulation_keeps_whole_gradients_on_every_gpu_unless_each_micro_batch_is_reduced():
    once = parts(MODEL, gpus=4)
    kept = parts(MODEL, gpus=4, accumulation=4)
    reduced = parts(MODEL, gpus=4, accumulation=4, sync_each_batch=True)
    # not quite all of them: where the peak is, some layers' are reduced already, or were not there yet without it
    assert 0.6 * 2 * P < kept.allocated - once.allocated <= 2 * P
    assert reduced.allocated - once.allocated <= 2 * P / 4
    assert parts(MODEL, accumulation=4).parts["gradients"] == 2 * P


def test_v38_fp32_master_weights_double_every_state_and_eight_bit_moments_shrink_theirs():
    bf16, fp32, eight = (parts(SMALL, s, gpus=2).parts for s in (PURE_BF16, FP32_MASTER, EIGHT_BIT_ADAMW))
    assert fp32["weights"] == 2 * bf16["weights"]
    assert fp32["moments"] == 2 * bf16["moments"]
    assert eight["weights"] == bf16["weights"]
    assert eight["moments"] == pytest.approx(bf16["moments"] / 2, rel=0.02)  # one scale a block of 256


def test_autocast_keeps_copies_of_checkpointed_weights_until_the_forward_ends():
    layers = tuple(replace(layer, cast=40 * M) for layer in SMALL.layers)
    plan = parts(replace(SMALL, layers=layers), FP32_MASTER)
    assert plan.phase == "end of forward"
    assert plan.parts["gathered"] == 4 * 40 * M
    assert parts(replace(SMALL, layers=layers), FP32_MASTER, unchecked=4).parts.get("gathered", 0) == 0


def test_adapters_have_the_only_gradients_and_moments():
    lora, qlora = parts(ADAPTED, LORA).parts, parts(ADAPTED, QLORA).parts
    assert lora["weights"] == 2 * P + 4 * 4e6
    assert lora["moments"] == 8 * 4e6
    assert qlora["weights"] == 4 * M * 0.5625 + 2 * 4 * M + 2 * 4e6
    # packed weights are not sharded, the rest is
    assert parts(ADAPTED, QLORA, gpus=4).parts["weights"] == 4 * M * 0.5625 + (2 * 4 * M + 2 * 4e6) / 4


def test_a_tied_embedding_is_held_whole_with_its_gradient():
    tied = replace(MODEL, tied=True, tail=0)
    plan = parts(tied, gpus=4)
    assert plan.phase == "backward of layer 2"  # layer 1 has no embedding to gather behind it
    assert plan.parts["gathered"] == 2 * M + 2 * M + 2 * M + 2 * 2 * 2 * M


def sizes(model):
    return lambda setting, job: model


def test_what_fits_leaves_room_for_the_allocator_and_the_context():
    plan = parts(MODEL)
    live, outside = plan.allocated / GIB, context_gib(1)
    assert fit_of(plan, live + outside - 0.01) is Fit.TOO_BIG
    assert fit_of(plan, live + outside + 0.01) is Fit.TIGHT
    assert fit_of(plan, live * (1 + RESERVE_SHARE) + outside + 0.01) is Fit.FITS
    assert context_gib(2) > context_gib(1)


def test_the_smallest_number_of_gpus_fits_and_one_less_does_not():
    job = MemoryJob(gpus=1)
    count = smallest_gpus(sizes(SMALL), PURE_BF16, job, 40.0)
    assert count is not None
    assert count > 1
    for gpus, fits in ((count, True), (count - 1, False)):
        assert (fit_of(parts(SMALL, gpus=gpus), 40.0) is Fit.FITS) is fits
    assert smallest_gpus(sizes(SMALL), PURE_BF16, job, 10.0) is None  # the head alone is larger
    assert smallest_gpus(sizes(ADAPTED), QLORA, job, 12.0) is None  # not sharded


def test_layers_without_checkpointing_fill_the_memory_left():
    job = MemoryJob(gpus=4)
    model = replace(SMALL, layers=SMALL.layers * 8)
    count = most_unchecked(model, PURE_BF16, job, 140.0)
    assert 0 < count < 32
    assert fit_of(plan_memory(model, PURE_BF16, replace(job, unchecked=count)), 140.0) is Fit.FITS
    assert fit_of(plan_memory(model, PURE_BF16, replace(job, unchecked=count + 1)), 140.0) is not Fit.FITS


@pytest.mark.parametrize(
    ("memory_gib", "checkpointing", "words"),
    [
        (300.0, "none", "not needed"),
        (80.0, "selective", "layers can do without"),
        (67.0, "full", "on all 4 layers"),
        (10.0, None, None),
    ],
)
def test_checkpointing_is_as_light_as_the_memory_allows(memory_gib, checkpointing, words):
    choice = choose(sizes(replace(SMALL, layers=(SMALL.layers[0],) * 4)), PURE_BF16, MemoryJob(), memory_gib)
    assert choice.checkpointing == checkpointing
    line = checkpointing_line(choice)
    assert line is None if words is None else words in line


@pytest.mark.parametrize(
    ("memory_gib", "words"),
    [
        (79.0, "(activation_checkpointing_layers: 3); or, faster, of the last 2 the outputs of products can be kept"),
        (74.0, "on all 4 layers; of the last 1 the outputs of products can be kept, as auto does by measuring"),
    ],
)
def test_products_are_offered_where_layers_have_some(memory_gib, words):
    model = replace(SMALL, layers=(replace(SMALL.layers[0], saved=9 * M, products=4 * M),) * 4)
    choice = choose(sizes(model), PURE_BF16, MemoryJob(), memory_gib)
    assert words in checkpointing_line(choice)


def test_products_are_there_from_a_layers_forward_to_its_own_backward():
    model = replace(MODEL, layers=tuple(replace(LAYER, products=2 * M) for _ in range(4)))

    def activations(**job):
        found = memory_plan._phases(model, PURE_BF16, MemoryJob(gpus=4, **job))
        return [parts["activations"] for phase, parts in found if phase.startswith("backward of layer")]

    # from the last layer's backward to the first one's; a layer's own are part of what it makes again
    plain = activations()
    assert activations(with_products=2) == [plain[0] + 2 * M, *plain[1:]]
    assert activations(with_products=3, unchecked=1) == [plain[0] + 6 * M, plain[1] + 4 * M, plain[2] + 2 * M, plain[3]]


def test_every_other_layer_is_offered_where_it_fits():
    model = replace(SMALL, layers=SMALL.layers * 8)
    choice = choose(sizes(model), PURE_BF16, MemoryJob(gpus=8), 160.0)
    step = choice.every_n_layers
    assert step is not None
    assert step > 1
    assert f"every_n_layers: {step}" in checkpointing_line(choice)
    spread = MemoryJob(gpus=8, every_n_layers=step)
    assert fit_of(plan_memory(model, PURE_BF16, spread), 160.0) is Fit.FITS
    assert [spread.checkpointed(i, 32) for i in range(3)] == [True, False, step == 2]


@pytest.mark.parametrize(
    ("job", "memory_gib", "gathered"),
    [
        (MemoryJob(gpus=8), 140.0, True),
        (MemoryJob(gpus=8), 30.0, False),
        (MemoryJob(gpus=1), 140.0, None),
        (MemoryJob(gpus=8, fsdp=False), 140.0, None),
    ],
    ids=["room", "no room", "one GPU", "DDP"],
)
def test_weights_stay_gathered_where_the_memory_allows(job, memory_gib, gathered):
    choice = choose(sizes(SMALL), PURE_BF16, job, memory_gib)
    assert choice.fit is Fit.FITS
    assert choice.gathered is gathered
    assert (gathering_line(choice) is not None) is (gathered is True)
    if gathered:
        told = choose(sizes(SMALL), PURE_BF16, replace(job, reshard=False), memory_gib)
        assert told.fit is Fit.FITS
        assert gathering_line(told) is None


@pytest.mark.parametrize(
    ("gpus", "memory_gib", "gpu", "ends"),
    [
        (1, 300.0, "H200", "1 x H200, pure bf16: 59.8 GiB per GPU, fits"),
        (1, 40.0, "A100", "1 x A100, pure bf16: 59.8 GiB per GPU, needs 3 GPUs"),
        (1, 64.0, None, "1 GPU, pure bf16: 59.8 GiB per GPU, fits tightly"),
        (1, 5.0, None, "1 GPU, pure bf16: 59.8 GiB per GPU, does not fit on 1024 either"),
        (1, None, None, "1 GPU, pure bf16: 59.8 GiB per GPU"),
    ],
)
def test_a_line_says_what_takes_how_much_and_whether_it_fits(gpus, memory_gib, gpu, ends):
    choice = choose(sizes(SMALL), PURE_BF16, MemoryJob(gpus=gpus), memory_gib)
    assert choice_line(choice, P, gpu) == f"8.0B full fine-tune, {ends}"


def test_sizes_are_written_as_people_write_them():
    assert [size_in_words(n) for n in (26_895_998_464, 1.72e9, 360e6, 60_000)] == ["27B", "1.7B", "360M", "60k"]
    assert [gib(n * GIB) for n in (105.09, 23.5, 0.06)] == ["105", "23.5", "0.06"]
    assert "NCCL" in margin_line(2)
    assert "NCCL" not in margin_line(1)


def test_an_h200_has_what_its_driver_shows():
    assert GPU_MEMORY_GIB["h200"] == pytest.approx(139.8)
