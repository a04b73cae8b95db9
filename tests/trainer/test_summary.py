import io
import re

import pytest
from rich.console import Console
from support import tiny_hybrid, tiny_tokenizer, tokenized

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.summary import loss_summary
from hf_speedkit.trainer.metrics.progress import compact_line
from hf_speedkit.trainer.summary import print_summary

LENGTHS = [9, 4, 17, 2, 30, 8, 8, 21]


def table_of(trainer, **more):
    written = io.StringIO()
    print_summary(trainer.summary(), console=Console(file=written, width=300), **more)
    return written.getvalue()


def trainer_for(path, *, data=None, **changes):
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 32, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 5, "report_to": "none",
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=tiny_hybrid(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=tokenized(LENGTHS) if data is None else data,
        processing_class=tiny_tokenizer(),
    )


def test_the_table_says_what_happened_and_where_to_look(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=6, trace_steps=[3])
    trainer.train()
    shown = table_of(trainer, notes=("chosen by hand",))
    for words in (
        "chosen by hand", "packing efficiency", "rows x longest <= 32", "real tokens / s", "6 steps",
        "kernels FALLBACK", "proven on", "hf-speedkit trace", "speedkit_steps.jsonl", "(step 5) ->", "(step 6)",
        "model not saved",
    ):  # fmt: skip
        assert words in shown
    assert "resumed" not in shown


def test_a_stream_is_packed_too_and_a_run_that_has_not_begun_is_not_called_unpacked(tmp_path):
    streamed = trainer_for(tmp_path / "stream", max_steps=2, data=tokenized(LENGTHS).to_iterable_dataset())
    shown = table_of(streamed)
    assert "rows of 32 slots, planned when training begins" in shown
    streamed.train()
    shown = table_of(streamed)
    assert "rows of 32 slots, packed online from a stream" in shown
    assert "of slots hold a token" in shown
    assert not re.search(r"packing +. off", shown)
    assert re.search(
        r"packing +. off", table_of(trainer_for(tmp_path / "padded", packing=False, tokens_per_batch=None))
    )


def test_one_logged_loss_is_no_change(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.train()
    shown = table_of(trainer)
    assert "(step 1, the only one logged)" in shown
    assert "in 1 step " in shown


def test_a_resumed_session_shows_its_own_loss(tmp_path):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    trainer_for(tmp_path, **settings).train()
    resumed = trainer_for(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.summary().loss.first_step == 4
    assert "after step 3" in table_of(resumed)
    assert "checkpoint-6" in table_of(resumed)


def test_what_comes_from_data_is_no_markup(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.train()
    assert "[red]boo[/red]" in table_of(trainer, notes=("[red]boo[/red]",))


@pytest.mark.parametrize(
    ("history", "after", "expected"),
    [
        ([], 0, None),
        ([{"step": 5, "eval_loss": 1.0}], 0, None),
        ([{"step": 5, "loss": 4.0}, {"step": 10, "loss": 2.0}], 0, (4.0, 2.0)),
        ([{"step": 5, "loss": 4.0}, {"step": 10, "loss": 2.0}, {"step": 15, "loss": 1.0}], 5, (2.0, 1.0)),
    ],
)
def test_first_and_last_loss_are_those_of_the_session(history, after, expected):
    found = loss_summary(history, after_step=after)
    assert (None if found is None else (found.first, found.last)) == expected


def test_a_progress_line_shows_what_a_person_watches():
    line = compact_line(
        {"loss": 3.14159, "speed/real_tokens_per_second": 12345.6, "speed/total_slots": 7, "epoch": 1.0}
    )
    assert line == "loss 3.142, 12,346 real tokens/s"
    assert compact_line({"train_runtime": 3.0}) == ""
    named = {"eval_code_loss": 2.5, "eval_code_accuracy": 0.25, "eval_code_runtime": 1.0, "eval_code_num_tokens": 9.0}
    assert compact_line(named) == "eval code_loss 2.500, eval code_accuracy 0.250"
