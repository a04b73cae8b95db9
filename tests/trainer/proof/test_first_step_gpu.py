"""On a real GPU: the kernels of the first micro-batch are those that the proof promised; others stop the run."""

import pytest
import torch
from support import tiny_tokenizer, tokenized
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from hf_speedkit import KernelAssertionCallback, SpeedSFTConfig, SpeedSFTTrainer, attach
from hf_speedkit.core.errors import KernelAssertionError
from hf_speedkit.core.records import KernelVerdict

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]

SLOTS = 512
LENGTHS = [90, 40, 170, 20, 300, 80, 81, 210, 50, 130, 30, 280, 110, 60, 190, 20] * 4


def model():
    """Four layers with heads that flash attention, fla and Liger take."""
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, layer_types=["linear_attention"] * 3 + ["full_attention"], pad_token_id=0,
        eos_token_id=1, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).to(torch.bfloat16)


def packed_trainer(path, **changes):
    values = {
        "output_dir": str(path), "tokens_per_batch": SLOTS, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "max_steps": 3, "logging_steps": 1, "gradient_accumulation_steps": 2,
        "activation_checkpointing": True,
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=model(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS),
        processing_class=tiny_tokenizer(),
    )


class Rebind(TrainerCallback):
    """After the proof, puts the slow function in the place of the proven one."""

    def __init__(self, namespace):
        self.namespace = namespace
        self.original = namespace["torch_chunk_gated_delta_rule"]

    def on_epoch_begin(self, args, state, control, **kwargs):
        from hf_speedkit.kernels import reference

        self.namespace["torch_chunk_gated_delta_rule"] = reference.chunk_gated_delta_rule

    def undo(self):
        self.namespace["torch_chunk_gated_delta_rule"] = self.original


def test_every_fused_function_of_a_packed_run_is_seen_in_step_1_with_accumulation_and_checkpointing(tmp_path):
    pytest.importorskip("fla")
    trainer = packed_trainer(tmp_path)
    trainer.train()
    runs = {run.function: run for run in trainer.startup.runs}
    assert set(runs) >= {"chunk_gated_delta_rule", "causal_conv1d_fn", "attention"}
    assert all(run.forward and run.backward for run in runs.values() if run.forward is not None), runs
    fused = [check for check in trainer.startup.kernels if check.verdict is KernelVerdict.FUSED]
    assert any("its kernels ran in step 1" in check.evidence for check in fused)
    assert trainer.state.global_step == 3


def test_a_function_that_is_exchanged_after_the_proof_stops_the_run_in_step_1(tmp_path):
    pytest.importorskip("fla")
    import sys

    trainer = packed_trainer(tmp_path)
    rebind = Rebind(vars(sys.modules[type(trainer.model).__module__]))
    trainer.add_callback(rebind)
    try:
        with pytest.raises(KernelAssertionError, match=r"chunk_gated_delta_rule .* no forward and no backward kernel"):
            trainer.train()
    finally:
        rebind.undo()
    assert trainer.state.global_step == 0


def test_a_trace_of_step_2_is_whole_and_the_look_at_step_1_stays_away(tmp_path, caplog):
    pytest.importorskip("fla")
    trainer = packed_trainer(tmp_path, trace_steps=[2])
    trainer.train()
    assert len(trainer.trace.files) == 1
    assert trainer.startup.runs is None
    assert "another profiler runs in that step" in caplog.text


def test_a_plain_trainer_sees_its_kernels_too(tmp_path):
    pytest.importorskip("fla")
    pytest.importorskip("causal_conv1d")
    trainer = Trainer(
        model=model(),
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, report_to="none", disable_tqdm=True, save_strategy="no",
            per_device_train_batch_size=1,
        ),
        train_dataset=tokenized(LENGTHS),
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer(), pad_to_multiple_of=64),
    )  # fmt: skip
    callback = KernelAssertionCallback()
    attach(trainer, callback)
    trainer.train()
    runs = {run.function: (run.forward, run.backward) for run in callback.runs}
    assert runs["chunk_gated_delta_rule"] == (True, True)
    assert runs["causal_conv1d_fn"] == (True, True)
