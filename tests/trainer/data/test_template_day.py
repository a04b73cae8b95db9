"""Chat templates that write the day of their use."""

from datetime import datetime
from types import SimpleNamespace

import pytest
from chat_rows import PLAIN, chats, trainer_for

from hf_speedkit.trainer.data import template_day
from hf_speedkit.trainer.data.template_day import day_of_run, on_day, writes_the_day

DATED = "{{ 'system: w' + strftime_now('%-d') + ' ' }}" + PLAIN


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% set day = strftime_now('%d %b') %}", '{% set day = "07 Nov" %}'),
        (
            '{% if strftime_now is defined %}{{ strftime_now( "%Y\'s" ) }}',
            '{% if strftime_now is defined %}{{ "2026\'s" }}',
        ),
        ("{{ strftime_now(form) }}", None),
        (PLAIN, None),
        (None, None),
        ([{"name": "default", "template": DATED}], None),
    ],
)
def test_calls_with_a_format_that_stands_there_become_the_day(template, written):
    assert writes_the_day(template) is (written is not None)
    assert on_day(template, datetime(2026, 11, 7)) == (template if written is None else written)


def test_a_run_that_goes_on_on_another_day_trains_on_the_documents_it_began_with(tmp_path, monkeypatch):
    def start(day, folder="run", **more):
        class Today(datetime):
            @classmethod
            def now(cls):
                return cls(2026, 11, day)

        monkeypatch.setattr(template_day, "datetime", Today)
        trainer = trainer_for(tmp_path / folder, chats(), DATED, allow_existing_output=True, **more)
        assert trainer.processing_class.chat_template == DATED  # as it is saved
        return trainer, trainer._tokenizer.decode(trainer.train_dataset[0]["input_ids"]).split()[1]

    began, word = start(3, save_strategy="steps", save_steps=1)
    began.train()
    assert word == "w3"
    goes_on, word = start(4, max_steps=2)
    assert word == "w3"
    goes_on.train(resume_from_checkpoint=True)
    assert start(5, "another", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))[1] == "w3"
    other = tmp_path / "other" / "checkpoint-1"
    other.mkdir(parents=True)
    (other / "trainer_state.json").write_text("{}", encoding="utf-8")
    assert day_of_run(SimpleNamespace(resume_from_checkpoint=None, output_dir=str(other.parent))).day == 5
