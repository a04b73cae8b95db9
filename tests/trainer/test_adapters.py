"""LoRA and QLoRA: refused early where they cannot work, adapted where nothing is said."""

import pytest
from trl import ModelConfig

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import adapters
from hf_speedkit.trainer.adapters import adapter_config, require_adapters


@pytest.fixture
def installed(monkeypatch):
    """Pretend that just these packages can be found."""

    def only(*packages):
        monkeypatch.setattr(adapters, "is_installed", packages.__contains__)

    return only


@pytest.mark.parametrize(
    ("settings", "packages", "said"),
    [
        ({"use_peft": True}, (), "'peft' is not installed"),
        ({"use_peft": "true", "load_in_4bit": "true"}, ("peft",), "load_in_4bit is on, .*'bitsandbytes'"),
        ({"use_peft": True, "load_in_8bit": True}, ("peft",), "load_in_8bit is on, .*'bitsandbytes'"),
        ({"load_in_4bit": True}, ("peft", "bitsandbytes"), "nothing would be trained"),
        (
            {"use_peft": True, "load_in_4bit": True, "random_weights": True},
            ("peft", "bitsandbytes"),
            "while a checkpoint is read",
        ),
    ],
)
def test_adapters_that_cannot_be_made_are_refused_before_a_download(installed, settings, packages, said):
    installed(*packages)
    with pytest.raises(ConfigurationError, match=said) as refused:
        require_adapters(settings)
    assert refused.value.mend


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_peft": False, "load_in_4bit": "false"}, {"use_peft": True}, {"use_peft": True, "load_in_4bit": True}],
)
def test_what_is_there_is_not_asked_for(installed, settings):
    installed("peft", "bitsandbytes")
    require_adapters(settings)


def test_a_full_fine_tune_has_no_adapters():
    assert adapter_config(ModelConfig()) is None


@pytest.mark.parametrize(("named", "adapted"), [(None, "all-linear"), (["q_proj", "v_proj"], {"q_proj", "v_proj"})])
def test_all_linear_layers_are_adapted_unless_others_are_named(named, adapted):
    pytest.importorskip("peft", reason="pip install peft")
    config = adapter_config(ModelConfig(use_peft=True, lora_target_modules=named))
    assert config.target_modules == adapted
    assert (config.r, config.lora_alpha) == (16, 32)
