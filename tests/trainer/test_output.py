import pytest

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer.output import existing_run, refuse_existing_run, require_checkpoint, require_output_dir


@pytest.mark.parametrize(
    "name", ["speedkit_steps.jsonl", "trainer_state.json", "model.safetensors", "adapter_model.safetensors"]
)
def test_a_file_of_a_run_is_found(tmp_path, name):
    (tmp_path / name).touch()
    assert existing_run(tmp_path) == name


def test_a_checkpoint_is_found(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    assert existing_run(tmp_path) == "checkpoint-5"


def test_other_files_and_missing_directories_are_no_run(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "checkpoint-5").touch()  # a file of that name
    assert existing_run(tmp_path) is None
    assert existing_run(tmp_path / "missing") is None


def test_an_output_directory_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    require_output_dir(tmp_path / "new" / "deeper")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match="is no folder"):
            require_output_dir(place)
    monkeypatch.setattr("os.access", lambda place, mode: False)  # root may write everywhere
    with pytest.raises(ConfigurationError, match="may not be written to by this user"):
        require_output_dir(tmp_path / "new")


def test_the_refusal_names_the_three_ways_on(tmp_path):
    refuse_existing_run(tmp_path, None)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ConfigurationError) as refused:
        refuse_existing_run(tmp_path, "checkpoint-5")
    for way in ("another output_dir", "resume_from_checkpoint=True", "allow_existing_output=True"):
        assert way in str(refused.value)


@pytest.mark.parametrize("resume", [True, "runs/none", "checkpoint-5"])
def test_resuming_from_nothing_is_refused_before_a_model_is_loaded(tmp_path, resume):
    with pytest.raises(ConfigurationError, match="checkpoint"):
        require_checkpoint(resume, tmp_path)


@pytest.mark.parametrize("given", ["", "checkpoint-7"], ids=["the run's folder", "another number"])
def test_the_last_checkpoint_there_is_named_where_another_path_was_given(tmp_path, given):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "trainer_state.json").touch()
    with pytest.raises(ConfigurationError, match=f"resume_from_checkpoint: {tmp_path / 'checkpoint-5'}"):
        require_checkpoint(str(tmp_path / given), tmp_path / "new")


def test_a_checkpoint_that_is_there_passes(tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    require_checkpoint(True, tmp_path)
    (checkpoint / "trainer_state.json").touch()
    require_checkpoint(str(checkpoint), tmp_path)
