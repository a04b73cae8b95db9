"""What ran in the first step is held against the proof: real hooks and a real profiler, on a CPU by operator names."""

import logging

import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from hf_speedkit import KernelAssertionCallback, SpeedSFTConfig, SpeedSFTTrainer, ThroughputCallback, TraceCallback
from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.kernels.fused_layers import fused_layers
from hf_speedkit.kernels.ran import StepKernels
from hf_speedkit.trainer.attach import attach

SDPA = ("attention", "torch scaled_dot_product_attention")
VARLEN = ("attention", "speedkit_varlen")
OPERATORS = (r"attention_for_cpu$|attention_math", r"attention_for_cpu_backward|BmmBackward")
NEVER = (r"attention_for_cpu$|attention_math", r"a_kernel_that_is_not_there")


class Watcher(TrainerCallback):
    """Sees the weights and the hooks at each step's begin, before the forward."""

    def __init__(self):
        self.hooks = []
        self.weights = None

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.hooks.append(len(model._forward_pre_hooks))
        if self.weights is None:
            self.weights = [parameter.detach().clone() for parameter in model.parameters()]


def trainer_of(path, *callbacks, model=None, **changes):
    values = {"max_steps": 2, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "use_cpu": True}
    trainer = Trainer(
        model=model or tiny_llama(),
        args=TrainingArguments(output_dir=str(path), per_device_train_batch_size=1, **{**values, **changes}),
        train_dataset=tokenized([5, 9, 7, 4, 6, 8]),
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()),
    )
    attach(trainer, *callbacks)
    return trainer


def on_a_cpu(callback, expected):
    callback.step_kernels = StepKernels("cpu")
    callback.expected_names = expected
    return callback


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}], ids=str)
def test_the_first_micro_batch_shows_what_ran_and_no_other_is_looked_at(tmp_path, changes):
    callback, watcher = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS}), Watcher()
    trainer = trainer_of(tmp_path, callback, watcher, **changes)
    trainer.train()
    assert [(run.function, run.forward, run.backward) for run in callback.runs] == [("attention", True, True)]
    assert callback.checks[0].evidence.endswith("; its kernels ran in step 1")
    assert watcher.hooks == [1, 0]  # waits for the first forward, and is gone afterwards
    assert trainer.state.global_step == 2


def test_a_function_that_never_ran_stops_before_the_weights_are_touched_in_the_callbacks_own_words(tmp_path):
    callback, watcher = on_a_cpu(KernelAssertionCallback(), {SDPA: NEVER}), Watcher()
    trainer = trainer_of(tmp_path, callback, watcher)
    with pytest.raises(KernelAssertionError) as refused:
        trainer.train()
    assert "1 of 1 fused functions did not run in the first training step" in str(refused.value)
    assert "attention   LlamaAttention   no backward kernel" in str(refused.value)
    assert 'KernelAssertionCallback(mode="warn")' in str(refused.value)
    assert trainer.state.global_step == 0
    assert all(torch.equal(a, b) for a, b in zip(watcher.weights, trainer.model.parameters(), strict=True))


def test_hooks_that_come_after_the_proof_cost_a_kernel_and_not_the_job(tmp_path, caplog):
    """Whatever looks at a model (a tracker's watch, say) hangs hooks on its norms when training begins."""
    model = tiny_hybrid()
    callback = on_a_cpu(KernelAssertionCallback(requirements=("qk_rotary",)), {("qk_rotary", "hf_speedkit"): NEVER})
    with fused_layers(model, devices=("cpu",)):
        trainer_of(tmp_path, callback, model=model, max_steps=1).train()
    assert [run.backward for run in callback.runs if run.function == "qk_rotary"] == [False]
    assert caplog.text.count("so these layers run their own forward") == 1


def test_a_function_that_is_not_required_need_not_run(tmp_path):
    callback = on_a_cpu(KernelAssertionCallback(requirements=()), {SDPA: NEVER})
    trainer_of(tmp_path, callback, max_steps=1).train()
    assert callback.runs[0].backward is False


@pytest.mark.parametrize(
    ("trained", "reached"),
    [("lm_head", False), ("model.layers.1.mlp", False), ("model.layers.0.mlp", True), ("model.embed_tokens", True)],
)
def test_a_backward_that_no_gradient_has_to_take_is_not_demanded(tmp_path, trained, reached):
    model = tiny_llama()
    model.requires_grad_(False)
    model.get_submodule(trained).requires_grad_(True)
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    trainer_of(tmp_path, callback, model=model, max_steps=1).train()
    assert callback.runs[0].forward is True
    assert callback.runs[0].backward is (True if reached else None)


def test_warn_says_the_same_and_goes_on(tmp_path, caplog):
    callback = on_a_cpu(KernelAssertionCallback(mode="warn"), {SDPA: NEVER})
    trainer = trainer_of(tmp_path, callback)
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("did not run in the first training step") == 1


def test_a_second_training_looks_again_and_a_run_that_failed_leaves_no_profiler_behind(tmp_path):
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    trainer = trainer_of(tmp_path, callback)
    forward = trainer.model.model.forward
    trainer.model.model.forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert torch.autograd._profiler_enabled()
    trainer.model.model.forward = forward
    trainer.train()
    assert not torch.autograd._profiler_enabled()
    assert callback.runs[0].backward


def test_a_trace_of_the_same_step_goes_first_whatever_the_order_of_the_callbacks(tmp_path, caplog):
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    trace = TraceCallback(steps=(2,), output_dir=tmp_path)
    trainer_of(tmp_path, callback, trace).train()
    assert len(trace.files) == 1
    assert callback.runs is None
    assert caplog.text.count("kernels of step 1 UNVERIFIED, training goes on: another profiler runs in that step") == 1


def test_inside_a_profiler_of_ones_own_nothing_is_read(tmp_path, caplog):
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        trainer_of(tmp_path, callback, max_steps=1).train()
    assert any(event.name.startswith("aten::") for event in own.events())
    assert "another profiler runs in that step" in caplog.text


class Silent(StepKernels):
    """A machine where CUPTI is refused: the session runs and holds no kernels."""

    def end(self):
        return None if super().end() is None else frozenset()


def test_a_session_without_kernels_is_unverified_once_and_no_failure(tmp_path, caplog):
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    callback.step_kernels = Silent("cpu")
    trainer = trainer_of(tmp_path, callback, gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("UNVERIFIED, training goes on: CUPTI gave no kernels") == 1


@pytest.mark.parametrize("expected", [{SDPA: OPERATORS}, {}], ids=["on_a_cpu", "names_not_known"])
def test_where_there_is_nothing_to_look_for_nothing_is_said(tmp_path, caplog, expected):
    callback = KernelAssertionCallback()
    callback.expected_names = expected
    if not expected:
        callback.step_kernels = StepKernels("cpu")
    trainer_of(tmp_path, callback, max_steps=1).train()
    assert callback.runs is None
    assert "UNVERIFIED" not in caplog.text


def test_the_look_falls_into_the_step_that_enters_no_rate(tmp_path):
    records = []
    callback = on_a_cpu(KernelAssertionCallback(), {SDPA: OPERATORS})
    throughput = ThroughputCallback(sinks=(records.append,))
    trainer_of(tmp_path, throughput, callback, max_steps=3, logging_steps=1).train()
    assert [record.excluded for record in records] == ["warm-up", None, None]
    assert "its kernels ran in step 1" in callback.checks[0].evidence


@pytest.mark.parametrize("expected", [OPERATORS, NEVER], ids=["ran", "never_ran"])
def test_the_packed_trainer_does_the_same_and_its_summary_says_so(tmp_path, expected, caplog):
    caplog.set_level(logging.INFO)
    trainer = SpeedSFTTrainer(
        model=tiny_hybrid(),
        args=SpeedSFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, tokens_per_batch=32, max_steps=1, report_to="none",
            disable_tqdm=True, save_strategy="no", kernel_assertion="warn", gradient_accumulation_steps=2,
        ),
        train_dataset=tokenized([9, 4, 17, 2, 30, 8]),
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    on_a_cpu(trainer.startup, {VARLEN: expected})
    trainer.train()
    evidence = next(check.evidence for check in trainer.summary().kernels if check.function == "attention")
    assert ("its kernels ran in step 1" in evidence) is (expected is OPERATORS)
    assert ("did not run in the first training step" in caplog.text) is (expected is NEVER)
    assert caplog.text.count("step 1 ran the kernels of") == 1
