"""What is read from transformers' modeling files as text is what the live classes say."""

import sys

import pytest
import transformers

from hf_speedkit.kernels.attention import attention_flags
from hf_speedkit.kernels.modeling_files import abilities_of


@pytest.mark.parametrize(
    ("model_type", "model_class"),
    [
        ("qwen3_5", "Qwen3_5ForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("internlm3", "LlamaForCausalLM"),
        ("gptj", "GPTJForCausalLM"),
        ("gpt_oss", "GptOssForCausalLM"),
        ("qwen4_exp", "Qwen4ExpForCausalLM"),
    ],
)
def test_contract_the_flags_in_the_file_are_those_of_the_live_class(model_type, model_class):
    found = abilities_of(transformers.CONFIG_MAPPING[model_type]())
    live = getattr(transformers, found.model_class)
    assert found.model_class == model_class
    assert (found.flash, found.settable) == attention_flags(live.__new__(live))
    assert found.sdpa is live._supports_sdpa


def test_what_is_no_causal_language_model_has_none():
    assert abilities_of(transformers.CONFIG_MAPPING["vit"]()) is None


def test_reading_imports_no_modeling_file():
    before = "transformers.models.olmo2.modeling_olmo2" in sys.modules
    assert abilities_of(transformers.CONFIG_MAPPING["olmo2"]()).flash
    assert ("transformers.models.olmo2.modeling_olmo2" in sys.modules) is before
