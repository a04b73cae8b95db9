"""SpeedSFTTrainer as its users meet it."""

import inspect
import json
import math

import pytest
import torch
from datasets import Dataset, IterableDataset
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import (
    ConfigurationError,
    DatasetError,
    IsolationError,
    KernelAssertionError,
    NonFiniteError,
    PackingError,
)
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.core.throughput import RunTotals

LENGTHS = [9, 4, 17, 2, 30, 8, 8, 21, 5, 13, 3, 28, 11, 6, 19, 2]


def settings(path, **changes):
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "num_train_epochs": 1,
        "learning_rate": 1e-3, "report_to": "none",
    }  # fmt: skip
    return SpeedSFTConfig(**{**values, **changes})


def trainer_for(path, *, model=None, dataset=None, **changes):
    extra = {key: changes.pop(key) for key in ("callbacks", "eval_dataset", "data_collator") if key in changes}
    return SpeedSFTTrainer(
        model=tiny_hybrid() if model is None else model,
        args=settings(path, **changes),
        train_dataset=tokenized(LENGTHS) if dataset is None else dataset,
        processing_class=tiny_tokenizer(),
        **extra,
    )


class Recorder(TrainerCallback):
    """Notes the token ids of every training row."""

    def __init__(self):
        self.rows = []

    def on_train_begin(self, args, state, control, model=None, **_):
        def note(module, args, kwargs):
            if module.training and torch.is_grad_enabled() and self.on:
                self.rows.append(kwargs["input_ids"][0].tolist())

        self.on = False
        self.handle = model.register_forward_pre_hook(note, with_kwargs=True)

    def on_step_begin(self, args, state, control, **_):
        self.on = True

    def on_train_end(self, args, state, control, **_):
        self.handle.remove()


def test_the_signature_is_that_of_sft_trainer():
    ours = inspect.signature(SpeedSFTTrainer.__init__).parameters
    theirs = inspect.signature(SFTTrainer.__init__).parameters
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    assert all(ours[name].default == theirs[name].default for name in theirs)


def test_every_token_is_trained_on_once_and_counted_once(tmp_path):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, callbacks=[recorder])
    trainer.train()
    seen = [token for row in recorder.rows for token in row if token != 0]
    assert sorted(seen) == sorted(token for document in trainer.train_dataset["input_ids"][:] for token in document)
    totals = trainer.throughput.run_totals()
    assert isinstance(totals, RunTotals)
    assert totals.session.real == sum(LENGTHS)
    assert totals.session.target == sum(LENGTHS) - len(LENGTHS)
    assert totals.session.documents == len(LENGTHS)
    assert totals.session.slots == 32 * len(recorder.rows)
    assert {len(row) for row in recorder.rows} == {32}


def test_the_log_and_the_step_log_carry_the_rates(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["num_tokens"] == entry["speed/total_real_tokens"] for entry in logged)
    assert {"speed/real_tokens_per_second", "speed/data_wait_s", "entropy"} <= set(logged[-1])
    lines = [json.loads(line) for line in (tmp_path / "speedkit_steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, trainer.state.global_step + 1))
    assert sum(line["tokens"]["real"] for line in steps) == sum(LENGTHS)


def test_the_summary_says_what_was_proven(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.train()
    summary = trainer.summary()
    assert summary.isolation.passed
    assert (summary.isolation.output_change, summary.isolation.gradient_leak) == (0.0, 0.0)
    verdicts = {check.function: check.verdict for check in summary.kernels}
    assert verdicts["chunk_gated_delta_rule"] is KernelVerdict.FALLBACK
    assert verdicts["causal_conv1d_fn"] is KernelVerdict.FALLBACK
    assert summary.packing.packs < summary.packing.padded_batches
    assert summary.documents.documents == len(LENGTHS)
    assert summary.loss.first_step == 1


def test_the_layers_are_put_back_after_training(tmp_path):
    model = tiny_hybrid()
    trainer = trainer_for(tmp_path, model=model)
    trainer.train()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**trainer.startup.probe_batch(), use_cache=False)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trls_metrics_keep_their_values(tmp_path, accumulation):
    """Unpacked, so that TRL's own trainer sees the same batches."""
    common = {
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False, "save_strategy": "no",
        "logging_steps": 1, "num_train_epochs": 1, "per_device_train_batch_size": 2, "max_length": None,
        "gradient_accumulation_steps": accumulation, "packing": False, "report_to": "none",
    }  # fmt: skip
    logs = []
    for cls, config in ((SFTTrainer, SFTConfig), (SpeedSFTTrainer, SpeedSFTConfig)):
        dataset = tokenized([8] * 16)  # equal target counts: TRL's mean of means is then the weighted mean
        args = config(output_dir=str(tmp_path / cls.__name__), **common)
        trainer = cls(model=tiny_llama(), args=args, train_dataset=dataset, processing_class=tiny_tokenizer())
        trainer.train()
        logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for theirs, ours in zip(*logs, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-6), key


def token_mean_loss(model, dataset):
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in dataset:
            ids = torch.tensor([row["input_ids"]])
            logits = model(ids, use_cache=False).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += len(row["input_ids"]) - 1
    return total / count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"packing": False, "max_length": None, "per_device_eval_batch_size": 1},
        {"packing": False, "max_length": None, "per_device_eval_batch_size": 3},
        {"packing": False, "max_length": None, "per_device_eval_batch_size": 8},
        {"eval_packing": False},
    ],
    ids=["packed", "padded 1", "padded 3", "padded 8", "trained packed, evaluated padded"],
)
def test_v26_eval_loss_is_the_mean_over_target_tokens_however_rows_are_batched(tmp_path, changes):
    held_out = tokenized([2, 2, 2, 30, 4, 25, 3, 3], seed=7)
    trainer = trainer_for(tmp_path, eval_dataset=held_out, **changes)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(token_mean_loss(tiny_hybrid(), held_out), rel=1e-5)


def test_evaluation_during_training_changes_nothing_in_training(tmp_path):
    plain = trainer_for(tmp_path / "a", max_steps=4)
    plain.train()
    with_eval = trainer_for(
        tmp_path / "b", max_steps=4, eval_dataset=tokenized([5, 9], seed=3), eval_strategy="steps", eval_steps=2
    )
    with_eval.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, with_eval)]
    assert losses[0] == losses[1]
    assert with_eval.throughput.run_totals().session.real == plain.throughput.run_totals().session.real


@pytest.mark.parametrize("stop", [2, 6], ids=["inside epoch 0", "inside epoch 1"])
def test_a_resumed_run_sees_the_same_rows_in_the_same_order(tmp_path, stop):
    whole = Recorder()
    reference = trainer_for(tmp_path / "whole", num_train_epochs=2, callbacks=[whole])
    reference.train()
    assert reference.state.max_steps > stop + 1

    class StopAt(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == stop

    first, rest = Recorder(), Recorder()
    half = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": stop}
    trainer_for(tmp_path / "half", callbacks=[first, StopAt()], **half).train()
    resumed = trainer_for(tmp_path / "half", callbacks=[rest], **half)
    resumed.train(resume_from_checkpoint=True)
    assert first.rows + rest.rows == whole.rows
    last = [[e for e in t.state.log_history if "loss" in e][-1] for t in (reference, resumed)]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], abs=1e-6)
    for key in ("num_tokens", "speed/total_real_tokens", "speed/total_documents"):
        assert last[0][key] == last[1][key], f"v67 {key}"


def test_epochs_are_packed_anew_and_have_the_same_number_of_steps(tmp_path):
    recorder = Recorder()
    trainer = trainer_for(tmp_path, num_train_epochs=3, callbacks=[recorder])
    trainer.train()
    steps = trainer.state.max_steps // 3
    epochs = [recorder.rows[i * steps : (i + 1) * steps] for i in range(3)]
    assert trainer.state.global_step == trainer.state.max_steps
    assert epochs[0] != epochs[1]
    assert all(sum(t != 0 for row in epoch for t in row) == sum(LENGTHS) for epoch in epochs)


def test_a_traced_step_is_explained_and_stays_out_of_the_rates(tmp_path):
    from hf_speedkit import diagnose, summarize_trace

    trainer = trainer_for(tmp_path, trace_steps=[3])
    trainer.train()
    summary = summarize_trace(trainer.trace.files[0])
    lines = [json.loads(line) for line in (tmp_path / "speedkit_steps.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert (summary.facts.real_tokens, summary.facts.slots) == (steps[3]["tokens"]["real"], 32)
    assert [step for step, line in steps.items() if line["excluded"] == "traced"] == [2, 3, 4]
    assert diagnose(summary)


def test_trace_and_hooks_are_closed_when_training_fails(tmp_path):
    class Fail(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                raise RuntimeError("boom")

    trainer = trainer_for(tmp_path, trace_steps=[3], callbacks=[Fail()])
    before = [len(hooks) for hooks in (trainer.model._forward_pre_hooks, trainer.model._forward_hooks)]
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert [len(hooks) for hooks in (trainer.model._forward_pre_hooks, trainer.model._forward_hooks)] == before
    assert any("partial" in message or "no trace" in message for message in trainer.trace.messages)


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_leaking_model_does_not_train(tmp_path):
    model = tiny_hybrid()
    original = model.model.forward

    def dropping(*args, cu_seq_lens_q=None, cu_seq_lens_k=None, seq_idx=None, **kwargs):
        return original(*args, **kwargs)

    model.model.forward = dropping
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_for(tmp_path / "out", model=model)
    with pytest.raises(IsolationError, match="convolution, recurrence"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "out" / "speedkit_steps.jsonl").exists()


def test_v45_strict_mode_refuses_the_reference_and_names_both_functions(tmp_path):
    trainer = trainer_for(tmp_path, kernel_assertion="warn")
    trainer.args.kernel_assertion = "strict"  # from the start it would be refused before any data is looked at
    with pytest.raises(KernelAssertionError) as refused:
        trainer.train()
    for word in ("causal_conv1d_fn", "chunk_gated_delta_rule", "pip install", 'kernel_assertion="warn"'):
        assert word in str(refused.value)


def test_v10_a_padding_collator_put_in_afterwards_is_found(tmp_path):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    trainer = trainer_for(tmp_path)
    for collator, said in (
        (DataCollatorForLanguageModeling(pad_token_id=0), "one row"),
        (None, "a NoneType, makes no row of documents\n  TypeError"),
        (list, "makes no row of documents\n  it gave a list"),
    ):
        trainer.data_collator = collator
        with pytest.raises(PackingError, match=said):
            trainer.train()


def test_v10_a_collator_that_keeps_back_what_kernels_read_is_named(tmp_path):
    from transformers import DataCollatorWithFlattening

    trainer = trainer_for(tmp_path)
    trainer.data_collator = DataCollatorWithFlattening()
    with pytest.raises(PackingError, match="lacks cu_seq_lens_q, cu_seq_lens_k, seq_idx"):
        trainer.train()


def test_v10_v20_rows_put_into_the_datasets_place_are_counted_and_checked_again(tmp_path):
    """unsloth's `train_on_responses_only` and others assign masked rows to `trainer.train_dataset`."""
    trainer = trainer_for(tmp_path, max_steps=1)
    for wrong in (Dataset.from_dict({"text": ["w3"]}), tokenized([4, 5]).to_iterable_dataset(), None):
        trainer.train_dataset = wrong
        with pytest.raises(DatasetError, match="not by a tokenized Dataset"):
            trainer.train()
    trainer.train_dataset = tokenized([4, 4, 30, 30], targets_from=10)
    trainer.train()
    report = trainer.summary().documents
    assert (report.documents, report.targetless_documents, report.real_tokens) == (2, 2, 60)
    padded = trainer_for(tmp_path / "padded", packing=False, max_steps=1)
    with pytest.raises(DatasetError, match="not by a tokenized Dataset"):
        padded.train_dataset = Dataset.from_dict({"text": ["w3"]}).to_iterable_dataset()
        padded.train()
    padded.train_dataset = list(tokenized([4, 5]))  # which any padded Trainer takes
    padded.train()


def test_v10_a_training_loader_of_ones_own_is_refused_where_rows_are_packed(tmp_path, monkeypatch):
    loader = torch.utils.data.DataLoader([{"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([3, 4])}])
    monkeypatch.setattr(SpeedSFTTrainer, "get_train_dataloader", lambda self: loader)
    with pytest.raises(PackingError, match="nobody has packed its batches"):
        trainer_for(tmp_path, max_steps=1).train()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param({"data_collator": lambda rows: rows}, ConfigurationError, "packing=False", id="own collator"),
        pytest.param({"dataset": Dataset.from_dict({"body": ["a"]})}, DatasetError, "no column", id="no column"),
        pytest.param({"dataset": Dataset.from_dict({"text": []})}, DatasetError, "no rows", id="empty"),
        pytest.param(
            {"dataset": IterableDataset.from_generator(lambda: iter([{"text": "w3"}]))},
            ConfigurationError, "max_steps", id="streaming without max_steps",
        ),
        pytest.param({"tokens_per_batch": 20}, PackingError, "overlong", id="longest document does not fit"),
        pytest.param(
            {"dataset": Dataset.from_dict({"input_ids": [[3, -1, 4]]})}, DatasetError, "has token id -1", id="below 0"
        ),
        pytest.param(
            {"activation_checkpointing_kwargs": {"use_reentrant": True}}, ConfigurationError, "use_reentrant",
            id="reentrant checkpointing",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(tmp_path, changes, error, message):
    out = tmp_path / "out"
    with pytest.raises(error, match=message):
        trainer_for(out, **changes)
    assert not out.exists() or not any(out.iterdir())


@pytest.mark.parametrize(
    ("overlong", "documents", "real"),
    [("truncate", 16, 20 * 3 + sum(n for n in LENGTHS if n <= 20)), ("drop", 13, sum(n for n in LENGTHS if n <= 20)),
     ("split", 18, sum(LENGTHS) - 1)],  # 21 = 20 + 1, and a single token has no target
)  # fmt: skip
def test_v17_overlong_documents_are_dealt_with_by_choice_and_counted(tmp_path, overlong, documents, real):
    trainer = trainer_for(tmp_path, tokens_per_batch=20, overlong=overlong, max_steps=1)
    trainer.train()
    report = trainer.summary().documents
    assert (report.documents, report.real_tokens) == (documents, real)
    assert report.overlong_documents == 3


def test_v11_a_family_that_leaks_is_refused_with_the_reason(tmp_path):
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        )
    )  # fmt: skip
    with pytest.raises(PackingError, match="gpt_oss models leak"):
        trainer_for(tmp_path, model=model)


def test_an_output_dir_that_holds_a_run_is_not_written_over(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.train()
    trainer.train()  # the same trainer goes on
    before = (tmp_path / "speedkit_steps.jsonl").read_text()
    for checkpoint in (False, True):  # without one there is nothing to go on with
        (tmp_path / "checkpoint-1").mkdir() if checkpoint else None
        with pytest.raises(ConfigurationError, match="already holds a run") as refused:
            trainer_for(tmp_path, max_steps=1).train()
        assert ("resume_from_checkpoint" in refused.value.mend) is checkpoint
    assert (tmp_path / "speedkit_steps.jsonl").read_text() == before
    trainer_for(tmp_path, max_steps=1, allow_existing_output=True).train()


def test_v20_v31_documents_without_targets_are_dropped_and_counted_or_refused(tmp_path):
    trainer = trainer_for(tmp_path / "a", dataset=tokenized([4, 4, 30, 30], targets_from=10), max_steps=1)
    trainer.train()
    assert trainer.summary().documents.targetless_documents == 2
    with pytest.raises(DatasetError, match="target"):
        trainer_for(tmp_path / "b", dataset=tokenized([4, 4], targets_from=10))


def test_v30_a_nan_loss_is_shown_as_nan_and_counted_and_ends_training_by_default(tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            if state.global_step == 2:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = float("nan")

    trainer = trainer_for(tmp_path / "warn", max_steps=4, callbacks=[Poison()], nonfinite="warn")
    trainer.train()
    strict = trainer_for(tmp_path / "strict", max_steps=4, callbacks=[Poison()])
    with pytest.raises(NonFiniteError, match="the first was step 3"):
        strict.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert math.isfinite(logged[1]["loss"])
    assert math.isnan(logged[2]["loss"])
    assert logged[2]["speed/nonfinite_steps"] == 1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_a_plain_sft_config_is_enough(tmp_path):
    args = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, packing=True, max_length=16, report_to="none",
        per_device_train_batch_size=2, max_steps=1, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = SpeedSFTTrainer(
        model=tiny_hybrid(), args=args, train_dataset=tokenized(LENGTHS), processing_class=tiny_tokenizer()
    )
    trainer.train()
    assert trainer.throughput.run_totals().session.slots == 32


def test_text_is_tokenized_by_trl_and_packed(tmp_path):
    dataset = Dataset.from_dict({"text": ["w3 w4 w5", "w6", "w7 w8"]})
    trainer = trainer_for(tmp_path, dataset=dataset, max_steps=1)
    trainer.train()
    assert trainer.summary().documents.real_tokens == 3 + 1 + 2 + 3  # an eos each
