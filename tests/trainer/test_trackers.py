import os

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import installed_versions, trackers
from hf_speedkit.trainer.before_loading import require_parts
from hf_speedkit.trainer.trackers import require_trackers


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    for name in [*(name for name in os.environ if name.startswith("WANDB_")), "RANK", "NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("report_to", [None, "none", [], "", "tensorboard", ["tensorboard", "none"]])
def test_what_needs_no_login_passes(report_to):
    require_trackers({"report_to": report_to})


@pytest.mark.parametrize("report_to", ["dagshub", ["tensorboard", "dagshub"]])
def test_a_tracker_that_is_not_installed_is_named_with_its_command(report_to):
    with pytest.raises(ConfigurationError, match="pip install dagshub"):
        require_trackers({"report_to": report_to})


@pytest.mark.parametrize(
    ("name", "mend"), [("wandbb", "report_to: wandb$"), ("my_logs", "one of azure_ml, .* or none")]
)
def test_a_misspelt_name_is_no_package_to_install(name, mend):
    with pytest.raises(ConfigurationError, match=mend) as refused:
        require_trackers({"report_to": ["tensorboard", name]})
    assert "pip install" not in str(refused.value)


def test_the_trackers_are_those_of_transformers():
    assert sorted(INTEGRATION_TO_CALLBACK) == list(trackers._TRACKERS)


def test_a_tracker_that_either_of_two_packages_brings_is_there_with_the_other_one(monkeypatch):
    monkeypatch.setattr(installed_versions, "is_installed", "tensorboardX".__eq__)
    require_trackers({"report_to": "tensorboard"})


@pytest.mark.parametrize(
    ("report_to", "environment", "says"),
    [
        ("wandb", {}, "not logged in on this machine"),
        ("all", {}, "report_to is 'all', and wandb cannot start"),
        (["tensorboard", "wandb"], {"WANDB_DISABLED": "true"}, "which wandb and transformers 5 do not read"),
        ("wandb", {"WANDB_API_KEY": "abc"}, "its key is not one"),
        ("wandb", {"WANDB_API_KEY": "", "WANDB_BASE_URL": "https://wandb.example.org"}, "no key for https://wandb.exa"),
    ],
    ids=["no_key", "all", "disabled_as_before_5", "short_key", "own_server"],
)
def test_v81_a_wandb_that_could_not_start_is_refused_with_both_ways_on(monkeypatch, report_to, environment, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"wandb login, or WANDB_MODE=offline") as refused:
        require_trackers({"report_to": report_to})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "mend"),
    [
        ("WANDB_MODE", "Offline", "correct or unset WANDB_MODE"),
        ("WANDB_PROJECT", "team/job", "WANDB_ENTITY=team WANDB_PROJECT=job; correct or"),
        ("WANDB_PROJECT", "x" * 129, "correct or unset WANDB_PROJECT"),
        ("WANDB_ENTITY", "team/job", "WANDB_ENTITY=team WANDB_PROJECT=job; correct or"),
        ("WANDB_RUN_ID", "a/b", "correct or unset WANDB_RUN_ID"),
        ("WANDB_TAGS", "b" * 70, "correct or unset WANDB_TAGS"),
        ("WANDB_RESUME", "maybe", "correct or unset WANDB_RESUME"),
        ("WANDB_INIT_TIMEOUT", "soon", "correct or unset WANDB_INIT_TIMEOUT"),
    ],
)
def test_a_variable_that_wandb_cannot_take_is_named(monkeypatch, tmp_path, name, value, mend):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_NOTES", "any")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"(?s)does not take {name}\n.*{mend}"):
        require_trackers({"report_to": "wandb"})
    monkeypatch.setenv("RANK", "1")
    require_trackers({"report_to": "wandb"})


def test_a_trainer_of_ones_own_is_told_as_well_before_anything_is_loaded(monkeypatch, tmp_path):
    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    monkeypatch.setenv("WANDB_PROJECT", "team/job")
    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="wandb")
    with pytest.raises(ConfigurationError, match="does not take WANDB_PROJECT"):
        SpeedSFTTrainer("no/model", args)


@pytest.mark.parametrize(
    ("variable", "value", "states", "message"),
    [
        ("WANDB_WATCH", "all", "SHARDED_STATE_DICT", "unset WANDB_WATCH"),
        ("WANDB_WATCH", "gradients", "FULL_STATE_DICT", None),
        ("WANDB_LOG_MODEL", "end", "FULL_STATE_DICT", "unset WANDB_LOG_MODEL; trainer.save_model"),
        ("WANDB_LOG_MODEL", "checkpoint", "SHARDED_STATE_DICT", None),
        ("HF_DVCLIVE_LOG_MODEL", "true", "FULL_STATE_DICT", None),  # nobody reports to it
    ],
)
def test_a_tracker_that_reads_sharded_weights_on_one_rank_alone_is_refused(
    monkeypatch, tmp_path, caplog, variable, value, states, message
):
    from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

    args = SpeedSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(variable, value)
    require_parts(args)  # one process has all of the weights
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", states)
    if message is None:
        require_parts(args)
        assert ("will hold no weights" in caplog.text) == (variable == "WANDB_LOG_MODEL")
        return
    with pytest.raises(ConfigurationError, match=message):
        SpeedSFTTrainer("no/model", args)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"),
        ("WANDB_API_KEY", "k" * 40),
        ("WANDB_IDENTITY_TOKEN_FILE", "/run/token"),
        ("RANK", "3"),  # only world rank 0 talks to wandb
    ],
)
def test_wandb_that_can_start_passes(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_trackers({"report_to": "wandb"})


@pytest.mark.parametrize("server", ["", "https://wandb.example.org"], ids=["default", "own"])
def test_a_login_in_netrc_counts_for_the_server_that_wandb_will_talk_to(tmp_path, monkeypatch, server):
    wandb = pytest.importorskip("wandb")
    if server:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    host = (server or wandb.Settings().base_url).partition("://")[2]
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    netrc.chmod(0o600)
    require_trackers({"report_to": "wandb"})
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example.org")
    with pytest.raises(ConfigurationError, match=r"elsewhere\.example\.org"):
        require_trackers({"report_to": "wandb"})


def test_what_wandb_offline_wrote_into_the_folder_counts(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    require_trackers({"report_to": "wandb"})
