"""A training script that is ended after a few measured steps."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support import tiny_hybrid, tiny_tokenizer, tokenized
from transformers import HfArgumentParser, PreTrainedModel, Trainer
from transformers.integrations.integration_utils import TensorBoardCallback
from trl import SFTConfig, SFTTrainer, TrlParser

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.bench_records import bench_result
from hf_speedkit.core.errors import BenchError
from hf_speedkit.trainer import bench_child
from hf_speedkit.trainer.bench_child import BenchTask, bounded
from hf_speedkit.trainer.throughput_callback import ThroughputCallback


@pytest.fixture
def task(tmp_path, monkeypatch):
    task = BenchTask(result=str(tmp_path / "result.json"), steps=4, name="mine", workload="job", settings={"a": 1})
    monkeypatch.setattr(Trainer, "train", bounded(task, Trainer.train))
    return task


def settings(tmp_path, **more):
    return {
        "output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "num_train_epochs": 50, "save_steps": 1,
        "logging_steps": 1000, "disable_tqdm": True, "report_to": "tensorboard", **more,
    }  # fmt: skip


def trained(trainer, task):
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 0
    return bench_result(json.loads(Path(task.result).read_text(encoding="utf-8")))


def test_our_trainer_is_measured_for_the_steps_asked_for_and_saves_nothing(tmp_path, task):
    trainer = SpeedSFTTrainer(
        model=tiny_hybrid(),
        args=SpeedSFTConfig(**settings(tmp_path, tokens_per_batch=64)),
        train_dataset=tokenized([20, 30, 9] * 10),
        processing_class=tiny_tokenizer(),
    )
    result = trained(trainer, task)
    assert (result.name, result.workload, result.settings) == ("mine", "job", {"a": 1})
    assert (result.session_steps, len(result.steps)) == (4, 4)
    assert result.rates["speed/real_tokens_per_second"] > 0
    assert result.environment.packages["trl"]
    assert any(line.startswith("attention") for line in result.kernels)
    assert len(result.log) == 2  # every second step, whatever the job logs
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["speedkit_steps.jsonl"]
    assert not any(isinstance(one, TensorBoardCallback) for one in trainer.callback_handler.callbacks)


def test_so_is_any_other_trainer(tmp_path, task):
    trainer = SFTTrainer(
        model=tiny_hybrid(),
        args=SFTConfig(**settings(tmp_path, max_length=32, per_device_train_batch_size=2)),
        train_dataset=tokenized([20, 30, 9] * 10),
        processing_class=tiny_tokenizer(),
        callbacks=[ThroughputCallback()],  # measured once all the same
    )
    result = trained(trainer, task)
    assert len(result.steps) == 4
    assert result.tokens.real < result.tokens.slots  # padded rows
    assert result.rates["speed/real_tokens_per_second"] < result.rates["speed/slots_per_second"]
    assert any("FALLBACK" in line for line in result.kernels)


def test_one_step_gives_no_rate(tmp_path, monkeypatch):
    short = BenchTask(result=str(tmp_path / "result.json"), steps=1, name="mine", workload="job")
    monkeypatch.setattr(Trainer, "train", bounded(short, Trainer.train))
    trainer = SFTTrainer(
        model=tiny_hybrid(),
        args=SFTConfig(**settings(tmp_path)),
        train_dataset=tokenized([20, 30, 9]),
        processing_class=tiny_tokenizer(),
    )
    with pytest.raises(BenchError, match="none of the 1 steps was steady"):
        trainer.train()
    assert not (tmp_path / "result.json").exists()


def test_one_of_several_processes_leaves_without_the_threads_that_would_abort_it(monkeypatch):
    """Two gloo processes: SIGABRT, "terminate called without an active exception", and the bench had failed."""
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(SystemExit):
        bench_child._leave()  # goes on here, since nothing has ended it
    assert left == [0]


def test_a_script_that_never_trains_is_told_apart(tmp_path, monkeypatch, capsys):
    for name, value in (("argv", sys.argv), ("path", list(sys.path))):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(Trainer, "train", Trainer.train)
    script = tmp_path / "train.py"
    script.write_text("import sys, beside; assert sys.argv[1:] == ['--config', 'x.yaml'], sys.argv\n")
    (tmp_path / "beside.py").write_text("")
    task = json.dumps({"result": "r.json", "steps": 4, "name": "a", "workload": "b"})
    assert bench_child.main([task, str(script), "--config", "x.yaml"]) == bench_child.NO_TRAINING
    assert "without calling train()" in capsys.readouterr().err


PARSERS = ["TrlParser(SFTConfig).parse_args_and_config()", "HfArgumentParser(SFTConfig).parse_args_into_dataclasses()"]


@pytest.mark.parametrize("parser", [*PARSERS, "none"])
def test_a_rehearsal_ends_where_the_settings_are_taken_and_refuses_what_the_run_would(tmp_path, monkeypatch, parser):
    for owner, name in ((Trainer, "train"), (TrlParser, "parse_args_and_config"), (PreTrainedModel, "from_pretrained"),
                        (HfArgumentParser, "parse_args_into_dataclasses"), (sys, "argv"), (sys, "path")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name) if owner is not sys else list(getattr(sys, name)))
    script = tmp_path / "train.py"
    line = parser if parser.endswith(")") else "AutoModelForCausalLM.from_pretrained(str(model))"
    script.write_text(
        "from transformers import AutoModelForCausalLM, HfArgumentParser\nfrom trl import SFTConfig, TrlParser\n"
        f"model = {str(tmp_path)!r}\n{line}\nraise AssertionError('it went on')\n"
    )
    tiny_hybrid().config.save_pretrained(tmp_path)
    task = {"result": str(tmp_path / "r.json"), "steps": 4, "name": "a", "workload": "b", "rehearse": True}
    settings = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    with pytest.raises(SystemExit) as ended:
        bench_child.main([json.dumps(task), str(script), *settings])
    assert (ended.value.code, (tmp_path / "r.json").read_text()) == (0, "{}")
    if parser.startswith("TrlParser"):
        (tmp_path / "job.yaml").write_text("learning_rat: 1\n")
        with pytest.raises(ValueError, match="learning_rat"):
            bench_child.main([json.dumps(task), str(script), "--config", str(tmp_path / "job.yaml"), *settings])
