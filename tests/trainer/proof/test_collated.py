"""What collators make of the targets of rows, in a plain Trainer and in ours."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import plain_trainer
import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    default_data_collator,
)

from hf_speedkit import KernelAssertionCallback, PackedCollator, SpeedSFTConfig, SpeedSFTTrainer, attach
from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError, PackingError
from hf_speedkit.trainer.proof.collated import Look, looked_at, odd_targets
from hf_speedkit.trainer.proof.flattening import hidden_documents, rows_by_content

EOS = 1
MASKED = [{"input_ids": [2, 3, 4, EOS], "labels": [-100, -100, 4, EOS]} for _ in range(2)]
UNEVEN = [MASKED[0], {"input_ids": [5, 6, EOS], "labels": [-100, -100, EOS]}]
TEXTS = [{"input_ids": row["input_ids"]} for row in UNEVEN]


def padded_with_the_end(side="right"):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, side
    return tokenizer


def without_padding():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def all_targets(rows):
    """A collator that reads the labels of rows, and takes their tokens all the same."""
    assert all(row["labels"] for row in rows)
    return default_data_collator([{**row, "labels": row["input_ids"]} for row in rows])


def end_to_end(rows, *, starts=-100, positions=True):
    """A flattening collator of one's own."""
    ids, labels = [[i for row in rows for i in row["input_ids"]]], []
    for row in rows:
        first = row["input_ids"][0] if starts is None else starts
        labels += [first, *row.get("labels", row["input_ids"])[1:]]
    batch = {"input_ids": torch.tensor(ids), "labels": torch.tensor([labels])}
    where = [at for row in rows for at in range(len(row["input_ids"]))]
    return {**batch, "position_ids": torch.tensor([where])} if positions else batch


@pytest.mark.parametrize(
    ("rows", "collator", "refused"),
    [
        (MASKED, DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False), "targets of 2 of 2 tokens that labels"),
        (UNEVEN, DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False), "does not pad the labels"),
        (UNEVEN, DataCollatorForSeq2Seq(padded_with_the_end("left"), padding=True), None),
        (UNEVEN, DataCollatorWithFlattening(), None),
        (TEXTS, DataCollatorWithFlattening(separator_id=EOS), None),  # an end that was asked for
        (UNEVEN, PackedCollator(0, 16), None),
        (TEXTS, lambda rows: end_to_end(rows, starts=None), "1 of 1 documents behind another one begin with a target"),
        (TEXTS, lambda rows: end_to_end(rows, starts=None, positions=False), None),  # one text that was cut
        (MASKED, lambda rows: None, None),
        (UNEVEN, lambda rows: default_data_collator(rows[:1]), "keeps the first of 2 rows"),
        (UNEVEN[:1], lambda rows: default_data_collator(rows[:1]), None),
        ([{"input_ids": [2, EOS], "labels": [3]}], DataCollatorForSeq2Seq(tiny_tokenizer()), None),
        ([{"input_ids": [2, 3, EOS, 0], "labels": [-1, 3, EOS, -1], "attention_mask": [1, 1, 1, 0]}],
         default_data_collator, None),  # for a loss with ignore_index=-1
        (UNEVEN, DataCollatorWithPadding(without_padding()), None),  # fails, and not for the labels
        ([{"text": "w2"}], DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False), None),
        (iter(MASKED), DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False), None),
    ],
    ids=["lost", "uneven", "kept", "flat", "separator", "packed", "joined", "cut", "none", "first", "one", "seq2seq",
         "minus 1", "no pad", "text", "stream"],
)  # fmt: skip
def test_a_collator_that_trains_on_what_rows_leave_out_is_refused(rows, collator, refused):
    with nullcontext() if refused is None else pytest.raises(ConfigurationError, match=refused):
        assert odd_targets(looked_at(SimpleNamespace(dataset=rows, collate_fn=collator)), {EOS}) is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("tokenizer", "said"), [(padded_with_the_end, True), (lambda side: tiny_tokenizer(), False)])
def test_ends_that_a_collator_takes_for_padding_are_said(tokenizer, said, side):
    collator = DataCollatorForLanguageModeling(tokenizer(side), mlm=False)
    odd = odd_targets(looked_at(SimpleNamespace(dataset=TEXTS, collate_fn=collator)), {EOS})
    assert ("does not learn to stop" in (odd or "")) is said


@pytest.mark.parametrize(
    ("rows", "collator", "size", "said"),
    [
        (UNEVEN, lambda rows: default_data_collator(rows[:1]), 1, None),
        (UNEVEN, DataCollatorForLanguageModeling(padded_with_the_end(), mlm=False), 1, "targets of 1 of 1 tokens"),
        (MASKED, all_targets, 2, "It reads the labels"),
        (TEXTS, lambda rows: {"labels": torch.tensor([[2, 3, 4, -100], [5, 6, -100, -100]]), **padded(rows)}, 2,
         "the end token is a target in none of 2 rows"),
        (TEXTS, lambda rows: {"labels": torch.tensor([[2, 3, 4, -100]]), **padded(rows)}, 1, None),  # perhaps by chance
    ],
    ids=["first of one", "one", "reads labels", "ends", "an end"],
)  # fmt: skip
def test_a_look_is_as_large_as_a_batch_and_says_what_it_has_checked(rows, collator, size, said):
    loader = SimpleNamespace(dataset=rows, collate_fn=collator, batch_size=None)
    loader.batch_sampler = SimpleNamespace(batch_size=size)  # as accelerate's loaders have it
    try:
        odd = odd_targets(looked_at(loader), {EOS})
    except ConfigurationError as error:
        odd = str(error)
    assert (odd is None) is (said is None)
    assert said is None or said in odd


def padded(rows):
    return {
        "input_ids": default_data_collator([{"input_ids": (row["input_ids"] + [0])[:4]} for row in rows])["input_ids"]
    }


class Mapped(np.ndarray):
    """A memory map: a copy would read all of it."""

    copies = 0

    def __copy__(self):
        Mapped.copies += 1
        return self


class Opens:
    """A dataset that opens a file at its first row, draws numbers of its own and takes its time."""

    file = None

    def __init__(self):
        self.random, self.read = random.Random(0), []
        self.dataset = Mapped((2,))

    def __len__(self):
        return 4

    def __getitem__(self, at):
        self.file = self.file or object()
        self.read.append((at, self.random.random()))
        return TEXTS[0]


def test_the_look_leaves_a_dataset_as_it_was_and_takes_a_second_at_most(monkeypatch):
    dataset = Opens()
    within = torch.utils.data.Subset(dataset, range(4))
    looked_at(SimpleNamespace(dataset=within, collate_fn=DataCollatorWithFlattening()))
    assert dataset.file is None
    assert Mapped.copies == 0
    assert dataset.random.random() == random.Random(0).random()
    assert [at for at, _ in dataset.read] == [0, 1, 2, 3]
    monkeypatch.setattr("hf_speedkit.trainer.proof.collated._LONGEST_S", -1.0)
    looked_at(SimpleNamespace(dataset=dataset, collate_fn=DataCollatorWithFlattening()))
    assert [at for at, _ in dataset.read[4:]] == [0]
    looked_at(SimpleNamespace(collate_fn=DataCollatorWithFlattening()))  # a loader of somebody's own


@pytest.mark.parametrize("label", [0, -100])
def test_padding_that_rows_bring_as_targets_is_said(label):
    row = {"input_ids": [2, EOS, 0, 0], "labels": [2, EOS, label, label], "attention_mask": [1, 1, 0, 0]}
    odd = odd_targets(looked_at(SimpleNamespace(dataset=[row], collate_fn=default_data_collator)), {EOS})
    assert ("2 of the targets in a batch of 1 rows are padding" in (odd or "")) is (label == 0)


ONES = torch.ones(1, 7, dtype=torch.long)
OFFSETS = torch.tensor([0, 4, 7, 7], dtype=torch.int32)  # of a fixed number, the last once more


@pytest.mark.parametrize(
    ("attention", "batch", "mend"),
    [
        ("sdpa", {}, None),
        ("sdpa", {"attention_mask": ONES}, "leave attention_mask out"),
        ("flash_attention_2", {"attention_mask": ONES, "cu_seq_lens_q": OFFSETS}, "leave attention_mask out"),
        ("sdpa", {"attention_mask": torch.ones(1, 1, 7, 7)}, None),
        ("sdpa", {"position_ids": None, "cu_seq_lens_q": OFFSETS}, "position_ids that begin again"),
        ("flash_attention_2", {"position_ids": None, "cu_seq_lens_q": OFFSETS}, None),
        ("a_users_own", {"attention_mask": ONES}, None),
    ],
)
def test_documents_that_attention_does_not_look_for_are_refused(attention, batch, mend):
    given = {key: value for key, value in {**end_to_end(TEXTS), **batch}.items() if value is not None}
    refused = hidden_documents(given, attention)
    assert (refused is None) is (mend is None)
    assert mend is None or mend in refused.mend
    further = {**given, "position_ids": torch.tensor([[0, 1, 2, 50, 51, 52, 53]])}  # as if the text were longer
    assert hidden_documents(further, attention) is None
    for ignored in (-100, -1):  # padding, whatever its positions
        ended = {**given, "labels": torch.tensor([[2, 3, 4, EOS, ignored, ignored, ignored]])}
        assert hidden_documents(ended, attention) is None
    assert rows_by_content(end_to_end(TEXTS)) is not None
    assert rows_by_content(end_to_end(TEXTS[:1])) is None
    two = {key: torch.cat([value, value]) for key, value in end_to_end(TEXTS).items()}
    assert (hidden_documents(two, attention) is None) is not attention.startswith("flash")
    padded = {"input_ids": torch.tensor([[0, 0, 2, 3]]), "position_ids": torch.tensor([[1, 1, 0, 1]])}
    assert hidden_documents({**padded, "attention_mask": torch.tensor([[0, 0, 1, 1]])}, attention) is None


def test_v47_rows_of_a_users_own_collator_need_the_boundaries_that_recurrent_layers_read(tmp_path):
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in TEXTS]
    trainer = plain_trainer.make_trainer(tmp_path, model=tiny_hybrid(), collator=end_to_end, data=rows, max_steps=1)
    attach(trainer, KernelAssertionCallback(probe=False))
    with pytest.raises(KernelAssertionError, match="rows of several documents without cu_seqlens and seq_idx"):
        trainer.train()
    masked = plain_trainer.make_trainer(
        tmp_path / "b", collator=lambda rows: {**end_to_end(rows), "attention_mask": ONES}, data=TEXTS, max_steps=1
    )
    attach(masked, KernelAssertionCallback())
    with pytest.raises(PackingError, match="attention lets each see those before it"):
        masked.train()


def test_a_beginning_that_all_documents_have_is_no_leak_and_is_said():
    rows = [{"input_ids": [3, 4, EOS]}, {"input_ids": [3, 5, EOS]}]
    look = looked_at(SimpleNamespace(dataset=rows, collate_fn=lambda rows: end_to_end(rows, starts=None)))
    assert "trained on the first of the next, token 3" in odd_targets(look, {EOS})


def test_v25_a_collator_that_shifts_labels_is_said():
    rows = torch.tensor([[3, 4, 5, 6, 7, 8], [8, 9, 4, EOS, -100, -100]])
    for given, said in (
        ({"labels": rows[:, 1:]}, "6 of 6 targets are the token after their own"),
        ({"labels": rows[:, :-1]}, None),
        ({"labels": rows[:, 1:], "shift_labels": rows[:, 1:]}, None),
    ):
        batch = {"input_ids": rows[:, :-1].clamp(min=0), **given}
        odd = odd_targets(Look(None, [], batch), {EOS})
        assert (odd is None) is (said is None)
        assert said is None or said in odd


def test_what_is_drawn_for_the_look_is_drawn_again_in_training():
    drawn = []

    def collator(rows):
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return {}

    loader = SimpleNamespace(dataset=TEXTS, collate_fn=collator)
    looked_at(loader)
    looked_at(loader)
    assert drawn[0] == drawn[1]


def test_both_trainers_look_before_step_1(tmp_path, caplog):
    collator = DataCollatorForLanguageModeling(padded_with_the_end(), mlm=False)
    plain = plain_trainer.make_trainer(tmp_path / "a", collator=collator, data=MASKED, max_steps=1)
    attach(plain, KernelAssertionCallback())
    with pytest.raises(ConfigurationError, match="that labels of the rows leave out"):
        plain.train()
    said = plain_trainer.make_trainer(tmp_path / "b", collator=collator, data=MASKED, max_steps=1)
    attach(said, KernelAssertionCallback(mode="warn"))
    said.train()
    assert "that labels of the rows leave out" in caplog.text
    ours = SpeedSFTTrainer(
        model=tiny_llama(),
        args=SpeedSFTConfig(
            output_dir=str(tmp_path / "c"), use_cpu=True, bf16=False, packing=False, save_strategy="no",
            per_device_train_batch_size=1, activation_checkpointing=False, report_to="none", max_steps=1,
        ),
        train_dataset=tokenized([5, 5], targets_from=2),
        processing_class=tiny_tokenizer(),
        data_collator=collator,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="targets of 1 of 1 tokens"):
        ours.train()
