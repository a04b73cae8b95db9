"""ThroughputCallback on a GPU: a counted step inside a training run, and no wait between logging steps."""

import pytest
import torch
from plain_trainer import documents, make_trainer, pad, training_rows
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_speedkit.core.step_parts import PARTS
from hf_speedkit.trainer.attach import attach
from hf_speedkit.trainer.throughput_callback import ThroughputCallback

# Packages that only GPU machines have warn of their own things, and torch of its sync debug mode.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(580)]


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, num_key_value_heads=16, pad_token_id=0))


def trainer_on_the_gpu(path, **settings):
    data = documents((256,) * 80)
    return make_trainer(path, model=model(), data=data, collator=pad, use_cpu=False, bf16=True, **settings)


def test_a_counted_step_adds_up_inside_a_run(tmp_path):
    trainer = trainer_on_the_gpu(tmp_path, logging_steps=10)
    records = []
    callback = ThroughputCallback(count_launches_every=10, sinks=[records.append])
    attach(trainer, callback)
    trainer.train()
    rows = [row for row in training_rows(trainer) if "speed/launches" in row]
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    by_step = {record.step: record for record in records}
    for row in rows:
        parts = sum(row[f"speed/part_{name}_s"] for name in PARTS)
        counted = by_step[row["step"]]
        assert parts == pytest.approx(row["speed/counted_step_time_s"], rel=1e-6)
        # The same step by events on the device's clock, which know nothing of CUPTI.
        assert parts == pytest.approx(counted.step_time_s, rel=0.03, abs=2e-4)
        assert row["speed/launches"] > 100
        assert row["speed/device_busy_s"] <= row["speed/counted_step_time_s"]
        assert counted.excluded == "counted"
        assert counted.launches == row["speed/launches"]
    # Every counted step of the same work starts about as much.
    launches = [row["speed/launches"] for row in rows]
    assert max(launches) - min(launches) <= 0.05 * min(launches)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch says so of its own feature
def test_v62_our_callbacks_never_make_the_host_wait_between_logging_steps(tmp_path):
    class Watch(TrainerCallback):
        """In front of ours and behind them: what runs in between must not wait."""

        def __init__(self, on):
            self.on = on

        def _switch(self):
            torch.cuda.set_sync_debug_mode("error" if self.on else "default")

        def on_step_begin(self, args, state, control, **keywords):
            self._switch()

        def on_pre_optimizer_step(self, args, state, control, **keywords):
            self._switch()

        def on_step_end(self, args, state, control, **keywords):
            if not control.should_log and state.global_step > 1:  # the first step is waited for, once
                self._switch()

    trainer = trainer_on_the_gpu(tmp_path, logging_steps=10, max_steps=20)
    attach(trainer, Watch(on=True), ThroughputCallback(count_launches_every=0), Watch(on=False))
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.global_step == 20
