"""Counting a batch from the model's inputs, family by family."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from plain_trainer import documents, pad, tiny_llama
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_speedkit.core.records import TokenCounts
from hf_speedkit.trainer.metrics.micro_batches import MOST_UNREAD, MicroBatchCounter, counts_its_batch
from hf_speedkit.trainer.metrics.observation import GradientProbe, LabelRule, Observation, count_batch, read
from hf_speedkit.trainer.metrics.repeated_rows import count_new_rows


def counted(keywords, rule=None, arguments=()):
    observation = Observation()
    observation.add(*count_batch(arguments, keywords, rule or LabelRule()))
    return read([observation])[0].tokens


def ids(rows, length):
    return torch.arange(rows * length).reshape(rows, length)


BERT = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        (tiny_llama, LabelRule(shifted=True)),
        (lambda: BertForMaskedLM(BertConfig(**BERT)), LabelRule(shifted=False)),
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=8, d_ff=8, num_layers=1, num_heads=2)),
            LabelRule(shifted=False, encoder_decoder=True),
        ),
        (lambda: torch.nn.Linear(2, 2), LabelRule()),
    ],
)
def test_the_rule_follows_the_models_loss(model, rule):
    assert LabelRule.of(model()) == rule


def test_v65_a_padded_batch():
    batch = pad(documents((10, 4)))
    batch["labels"][:] = -100
    batch["labels"][0, 6:] = 5
    batch["labels"][1, 2:4] = 5
    assert counted(batch) == TokenCounts(slots=20, real=14, target=6, documents=2, squared_lengths=116)


def test_the_first_label_of_a_row_enters_no_causal_loss_but_a_masked_one():
    batch = {"input_ids": ids(1, 4), "labels": torch.tensor([[7, 8, -100, 9]])}
    assert counted(batch, LabelRule(shifted=True)).target == 2
    assert counted(batch, LabelRule(shifted=False)).target == 3


def test_a_packed_row_is_counted_by_its_boundaries():
    boundaries = torch.tensor([0, 3, 14, 19, 27], dtype=torch.int32)
    batch = {"input_ids": ids(1, 27), "cu_seq_lens_q": boundaries, "position_ids": ids(1, 27)}
    assert counted(batch) == TokenCounts(slots=27, real=27, target=None, documents=4, squared_lengths=219)


def pairs_by_mask(lengths, window):
    """(query, key) pairs that a causal mask with a window leaves, document by document."""
    return sum(int(torch.ones(n, n).tril().triu(1 - window).sum()) for n in lengths)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_pairs_inside_a_sliding_window_are_counted_wherever_lengths_are_known(window):
    rule = LabelRule(window=window)
    packed = {"input_ids": ids(1, 27), "cu_seq_lens_q": torch.tensor([0, 3, 14, 19, 27], dtype=torch.int32)}
    assert counted(packed, rule).window_pairs == pairs_by_mask((3, 11, 5, 8), window)
    assert counted(pad(documents((10, 4))), rule).window_pairs == pairs_by_mask((10, 4), window)
    assert counted({"input_ids": ids(2, 9)}, rule).window_pairs == pairs_by_mask((9, 9), window)
    positions = {"input_ids": ids(1, 9), "position_ids": ids(1, 9) + 5}  # where documents begin is not known
    assert counted(positions, rule).window_pairs is None
    assert counted(packed).window_pairs is None  # a model without a window


def test_an_encoder_decoder_counts_both_sides():
    labels = torch.tensor([[5, 6, -100], [5, 6, 7]])
    batch = {"input_ids": ids(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]), "labels": labels}
    rule = LabelRule(shifted=False, encoder_decoder=True)
    assert counted(batch, rule) == TokenCounts(slots=14, real=11, target=5, documents=2, squared_lengths=None)


def test_a_label_per_row_says_nothing_of_target_tokens():
    model = BertForSequenceClassification(BertConfig(**BERT))
    batch = {"input_ids": ids(2, 4), "labels": torch.tensor([0, 1])}
    assert counted(batch, LabelRule.of(model)).target is None


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 4, 4), {"full_attention": None}])
def test_a_mask_that_is_not_one_per_position_leaves_real_tokens_unknown(mask):
    counts = counted({"input_ids": ids(1, 4), "attention_mask": mask})
    assert (counts.slots, counts.real, counts.documents, counts.squared_lengths) == (4, None, None, None)


@pytest.mark.parametrize(
    ("positions", "documents", "squared", "pairs"),
    [
        ([[0, 1, 2, 0, 1, 0]], 3, 9 + 4 + 1, 1 + 2 + 2 + 1 + 2 + 1),  # DataCollatorWithFlattening's row
        ([[0, 1, 2], [0, 1, 0]], 3, 9 + 4 + 1, 1 + 2 + 2 + 1 + 2 + 1),
        ([[2, 3, 4, 5, 6, 7]], None, None, None),  # starts elsewhere
        ([[0, 1, 5, 6, 7, 8]], None, None, None),  # jumps, as for training on longer contexts than there are
        ([[[0, 1, 2, 3, 4, 5]]] * 3, None, None, None),  # three positions a token
    ],
)
def test_positions_that_start_again_at_0_tell_the_documents(positions, documents, squared, pairs):
    shape = (2, 3) if len(positions) == 2 else (1, 6)
    tokens = counted({"input_ids": ids(*shape), "position_ids": torch.tensor(positions)}, LabelRule(window=2))
    assert (tokens.slots, tokens.real) == (6, 6)
    assert (tokens.documents, tokens.squared_lengths, tokens.window_pairs) == (documents, squared, pairs)


def test_steps_that_nobody_logs_do_not_fill_the_devices_memory():
    counter = MicroBatchCounter()
    for number in range(2 * MOST_UNREAD + 1):
        counter.current.look_at_loss(torch.ones(()))
        counter.end_step(number, excluded=None)
        assert len(counter._waiting) < MOST_UNREAD
    assert counter.steps_waiting == 2 * MOST_UNREAD + 1
    assert [number for number, _ in counter.take()] == list(range(2 * MOST_UNREAD + 1))


def test_replicas_that_run_in_threads_lose_no_count(monkeypatch):
    model, counter = tiny_llama(), MicroBatchCounter()
    counter.watch(model, counting=lambda: True)
    add = TokenCounts.__add__
    monkeypatch.setattr(TokenCounts, "__add__", lambda one, other: time.sleep(0.02) or add(one, other))
    replicas = [
        threading.Thread(target=lambda: model(**pad(documents((4, 3))))) for _ in range(2)
    ]  # DataParallel's way
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join()
    assert counter.current.tokens.slots == 16


@pytest.mark.parametrize(
    ("new", "expected"), [(None, (14, 12, 2)), (1, (10, 9, 1)), (0, (0, 0, 0))], ids=["none is", "one is", "all are"]
)
def test_rows_that_repeat_are_slots_and_nothing_else(new, expected):
    batch = pad(documents((10, 4)))
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"] > 0, -100)
    observation = Observation()
    observation.add(*count_new_rows((), batch, LabelRule(), lambda rows: new))
    tokens = read([observation])[0].tokens
    assert (tokens.real, tokens.target, tokens.documents) == expected
    assert tokens.slots == 20


@pytest.mark.parametrize("name", ["pixel_values", "input_features"])
def test_a_batch_with_images_or_sound_claims_no_flops(name):
    batch = {**pad(documents((10, 4))), name: torch.zeros(2, 3)}
    tokens = counted(batch, LabelRule(window=2))
    assert (tokens.real, tokens.documents) == (14, 2)
    assert (tokens.squared_lengths, tokens.window_pairs) == (None, None)


def test_positional_and_embedded_inputs_are_seen():
    assert counted({}, arguments=(ids(2, 3),)).slots == 6
    assert counted({"inputs_embeds": torch.zeros(2, 5, 8)}).slots == 10


@pytest.mark.parametrize("keywords", [{}, {"pixel_values": torch.zeros(1, 3, 8, 8)}, {"input_ids": None}])
def test_a_batch_without_tokens_counts_nothing(keywords):
    assert count_batch((), keywords, LabelRule()) is None


def test_unknown_in_one_micro_batch_makes_the_step_unknown():
    observation = Observation()
    for batch in ({"input_ids": ids(1, 4), "labels": ids(1, 4)}, {"input_ids": ids(1, 4)}):
        observation.add(*count_batch((), batch, LabelRule()))
    (step,) = read([observation])
    assert step.micro_batches == 2
    assert step.tokens.slots == 8
    assert step.tokens.target is None


def test_a_window_is_read_in_one_transfer(monkeypatch):
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor.shape) or original(tensor))
    observations = []
    for _ in range(5):
        observation = Observation()
        observation.add(*count_batch((), pad(documents((4, 2))), LabelRule()))
        observation.look_at_gradient(torch.tensor(float("nan")))
        observation.look_at_gradient(torch.tensor(1.0))  # what was found stays found
        observations.append(observation)
    steps = read(observations)
    assert len(reads) == 1
    assert all(step.nonfinite for step in steps)
    assert read([]) == []


@pytest.mark.parametrize(("rank", "tensor_parallel", "own"), [(0, 2, True), (1, 2, False), (2, 2, True), (3, 1, True)])
def test_one_rank_of_a_tensor_parallel_group_counts_the_batch(rank, tensor_parallel, own):
    args = SimpleNamespace(process_index=rank, parallelism_config=SimpleNamespace(tp_size=tensor_parallel))
    assert counts_its_batch(args, torch.nn.Linear(1, 1)) is own
    counter = MicroBatchCounter(own_batch=own)
    counter.count(TokenCounts(slots=8, real=7, target=6, documents=1))
    counter.end_step(1, excluded=None)
    ((_, step),) = counter.take()
    assert step.tokens.slots == (8 if own else 0)


def test_v71_rows_cut_over_ranks_have_no_document_lengths_and_targets_that_were_shifted_before():
    """Context parallelism: this rank sees the second half of two rows, whose label to come is on the next rank."""
    seen = {
        "input_ids": ids(2, 4),
        "position_ids": torch.tensor([[4, 5, 6, 7]] * 2),
        "attention_mask": ids(2, 4) * 0 + 1,
    }
    labels = {"labels": torch.tensor([[-100, 5, 6, 7]] * 2)}
    counts = counted({**seen, **labels}, LabelRule(cut=True, window=2))
    assert counts == TokenCounts(slots=8, real=8, target=None, documents=None, squared_lengths=None)
    shifted = {"shift_labels": torch.tensor([[5, 6, 7, 8]] * 2)}
    assert counted({**seen, **labels, **shifted}, LabelRule(cut=True)).target == 8


@pytest.mark.parametrize(
    ("sizes", "together", "cut"), [({"tp": 2}, 2, False), ({"cp": 2, "tp": 2}, 4, True), ({"sp": 2}, None, True)]
)
@pytest.mark.parametrize("launched", [False, True])
def test_axes_that_are_not_data_parallel_share_a_batch_or_a_row(sizes, together, cut, launched, monkeypatch):
    config = SimpleNamespace(**{f"{axis}_size": size for axis, size in sizes.items()})
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", config if launched else None)
    args = SimpleNamespace(process_index=5, world_size=8, parallelism_config=None if launched else config)
    counter = MicroBatchCounter.of(args, torch.nn.Linear(1, 1), None)
    assert counter._cut is cut
    assert (None if counter._new_rows is None else counter._new_rows._ranks) == (together and 8 // together)


def probed(model, probe=None):
    """Whether the probe's gradient is found not to be finite; None where there is none to look at."""
    observation = Observation()
    observation.look_at_gradient((probe or GradientProbe()).smallest(model))
    return None if observation.gradient_mark is None else bool(observation.gradient_mark)


def gradient_of(loss_scale):
    model = tiny_llama()
    batch = pad(documents((5, 3)))
    (model(**batch).loss * loss_scale).backward()
    return model


@pytest.mark.parametrize(("scale", "nonfinite"), [(1.0, False), (float("nan"), True), (float("inf"), True)])
def test_the_probe_sees_a_loss_that_is_not_finite(scale, nonfinite):
    assert probed(gradient_of(scale)) is nonfinite


def test_the_probe_sees_what_clipping_spreads():
    model = gradient_of(1.0)
    model.lm_head.weight.grad[0, 0] = float("nan")
    probe = GradientProbe()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert probed(model, probe)


def test_without_gradients_the_probe_says_nothing():
    assert GradientProbe().smallest(tiny_llama()) is None
    assert probed(tiny_llama()) is None
