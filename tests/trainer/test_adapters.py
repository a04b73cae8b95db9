"""LoRA and QLoRA: refused early where they cannot work, adapted where nothing is said."""

import pytest
import torch
from support import tiny_llama
from trl import ModelConfig

from hf_speedkit.core.errors import ConfigurationError
from hf_speedkit.trainer import installed_versions
from hf_speedkit.trainer.adapters import adapter_config, complete_head, require_adapters, require_targets


@pytest.fixture
def installed(monkeypatch):
    """Pretend that just these packages can be found."""

    def only(*packages):
        monkeypatch.setattr(installed_versions, "is_installed", packages.__contains__)

    return only


@pytest.mark.parametrize(
    ("settings", "packages", "said"),
    [
        ({"use_peft": True}, (), "'peft' is not installed"),
        ({"use_peft": "true", "load_in_4bit": "true"}, ("peft",), "load_in_4bit is on, .*'bitsandbytes'"),
        ({"use_peft": True, "load_in_8bit": True}, ("peft",), "load_in_8bit is on, .*'bitsandbytes'"),
        ({"load_in_4bit": True}, ("peft", "bitsandbytes"), "nothing would be trained"),
        ({"lora_r": 8, "lora_alpha": 16}, ("peft",), "lora_r, lora_alpha without use_peft: .*every weight trained"),
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
    [
        {},
        {"use_peft": False, "load_in_4bit": "false", "lora_r": 8},
        {"use_peft": True, "lora_r": 8},
        {"use_peft": True, "load_in_4bit": True},
    ],
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_target_modules": ["q_proj", "c_attn"]}, r"names c_attn, .*\n.*down_proj, .*q_proj"),
        ({"lora_target_modules": ["c_attn"]}, "names c_attn"),  # TRL makes a text of a list of one
        ({"lora_r": 0}, "lora_r is a whole number from 1 up"),
        ({"lora_dropout": 2.0}, "from 0 up and below 1"),
        ({"lora_target_modules": ["q_proj", "lm_head", "layers.63.self_attn.q_proj"]}, None),
        ({"lora_target_modules": [r".*\.\d+\.self_attn\.q_proj"]}, None),
        ({"lora_target_modules": ["all-linear"]}, None),
        ({}, None),
        ({"use_peft": False, "lora_target_modules": ["c_attn"]}, None),
    ],
    ids=["one of two", "one", "rank", "dropout", "there", "a pattern", "all", "none", "no adapters"],
)
def test_adapters_on_layers_that_are_not_there_are_refused_from_the_config(given, said):
    args = ModelConfig(**{"use_peft": True, **given})
    if said is None:
        require_targets(args, tiny_llama().config)
        return
    with pytest.raises(ConfigurationError, match=said):
        require_targets(args, tiny_llama().config)


def test_a_single_name_is_a_name_and_no_pattern():
    pytest.importorskip("peft", reason="pip install peft")
    args = ModelConfig(use_peft=True, lora_target_modules=["q_proj"])
    assert adapter_config(args).target_modules == {"q_proj"}


class SingleTokens(torch.nn.Module):
    """As peft wraps the output layer where it trains single tokens of tied embeddings: a weight, and no bias."""

    def __init__(self, layer):
        super().__init__()
        self.token_adapter = torch.nn.Module()
        self.token_adapter.base_layer = layer

    @property
    def weight(self):
        return self.token_adapter.base_layer.weight

    def forward(self, hidden):
        return self.token_adapter.base_layer(hidden)


def test_trls_loss_head_serves_an_output_layer_of_which_single_tokens_are_trained():
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_llama()
    add_fused_lm_head(model)
    complete_head(model)  # a plain one is left alone
    ids = torch.arange(2, 9)[None]
    expected = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
    model.set_output_embeddings(SingleTokens(model.get_output_embeddings()))
    complete_head(model)
    torch.testing.assert_close(model(input_ids=ids, labels=ids, fused_lm_head=True).loss, expected)
