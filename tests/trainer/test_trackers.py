import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import trackers
from hf_speedkit.trainer.trackers import require_trackers


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DISABLED", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


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


def test_wandb_without_a_login_is_refused_with_both_ways_on():
    with pytest.raises(ConfigurationError, match=r"wandb login, or WANDB_MODE=offline"):
        require_trackers({"report_to": "wandb"})


@pytest.mark.parametrize(("name", "value"), [("WANDB_MODE", "offline"), ("WANDB_API_KEY", "k" * 40)])
def test_wandb_offline_or_with_a_key_passes(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_trackers({"report_to": "wandb"})


def test_a_login_in_netrc_counts(tmp_path):
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    require_trackers({"report_to": "wandb"})
