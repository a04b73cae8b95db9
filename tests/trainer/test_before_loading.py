"""A job whose kernels are missing is refused from the config alone: no weights are there in any of these tests."""

import functools
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import qwen27b_sft
import torch
from datasets import Dataset
from support import tiny_hybrid, tiny_tokenizer, tokenized
from transformers import AutoConfig, Qwen3_5TextConfig, TrainerCallback

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError, PackingError
from hf_speedkit.kernels.skeleton import probe_config
from hf_speedkit.trainer import optional_packages
from hf_speedkit.trainer.before_loading import require_kernels, require_parts
from hf_speedkit.trainer.stored_weights import refuse_stored_quantized

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
from fake_kernels import RIGHT_CONVOLUTION, RIGHT_RULE, forget_fakes, write_fakes


class Untouched:
    """A tokenizer that nobody may ask for anything."""


@pytest.fixture(autouse=True)
def _no_fake_stays_behind():
    yield
    forget_fakes()


@pytest.fixture
def folder(tmp_path):
    """A model without weights."""
    config = tiny_hybrid().config
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def settings(path, **changes):
    values = {"use_cpu": True, "bf16": False, "tokens_per_batch": 32, "report_to": "none"}
    return SpeedSFTConfig(output_dir=str(path / "run"), **{**values, **changes})


def test_a_trainer_given_a_name_refuses_before_it_loads_or_tokenizes_with_one_command(folder, tmp_path):
    with pytest.raises(KernelAssertionError) as refused:
        SpeedSFTTrainer(
            model=folder, args=settings(tmp_path, kernel_assertion="strict"), train_dataset=tokenized([9, 4, 17])
        )
    text = str(refused.value)
    assert text.startswith("3 of 4 layers would run the reference implementation")
    assert 'Mend it:  pip install "flash-linear-attention>=0.6,<0.7"\nGo on' in text
    assert "fla's convolution takes its place once fla is installed" in text
    assert not (tmp_path / "run").exists()


def test_v50_a_trainer_given_a_model_refuses_before_it_tokenizes(tmp_path):
    conversations = Dataset.from_dict({"messages": [[{"role": "user", "content": "w3"}]]})
    with pytest.raises(KernelAssertionError, match="3 of 4 layers would run the reference implementation"):
        SpeedSFTTrainer(
            model=tiny_hybrid(),
            args=settings(tmp_path, kernel_assertion="strict"),
            train_dataset=conversations,
            processing_class=Untouched(),
        )


@pytest.mark.parametrize("mode", ["auto", "warn", "off"])
def test_in_the_other_modes_the_weights_are_what_is_missing(folder, tmp_path, mode, caplog):
    with pytest.raises(ConfigurationError, match="no file named"):
        SpeedSFTTrainer(
            model=folder, args=settings(tmp_path, kernel_assertion=mode), train_dataset=tokenized([9, 4, 17])
        )
    assert "reference implementation" not in caplog.text


def test_v11_a_family_that_leaks_is_refused_from_its_config_in_every_mode(tmp_path):
    AutoConfig.for_model("gpt_oss").save_pretrained(tmp_path / "model")
    with pytest.raises(PackingError, match="gpt_oss models leak"):
        require_kernels(str(tmp_path / "model"), settings(tmp_path, kernel_assertion="off"))
    require_kernels(str(tmp_path / "model"), settings(tmp_path, kernel_assertion="off", packing=False))


def test_v48_right_packages_pass_and_nothing_is_said(folder, tmp_path, monkeypatch, caplog):
    write_fakes(tmp_path, fla=RIGHT_RULE, convolution=RIGHT_CONVOLUTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    require_kernels(folder, settings(tmp_path, kernel_assertion="strict"))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("changes", "refused"),
    [({}, False), ({"packed_attention": "keep"}, True), ({"packing": False}, True)],
    ids=["may_be_replaced", "kept", "not_packed"],
)
def test_eager_attention_is_refused_where_packed_attention_will_not_replace_it(tmp_path, changes, refused):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path / "model")
    args = settings(tmp_path, kernel_assertion="strict", model_init_kwargs={"attn_implementation": "eager"}, **changes)
    if refused:
        with pytest.raises(KernelAssertionError, match='attn_implementation="sdpa"'):
            require_kernels(str(tmp_path / "model"), args)
    else:
        require_kernels(str(tmp_path / "model"), args)


def test_a_flash_attention_that_is_not_installed_is_refused_before_the_download(tmp_path):
    AutoConfig.for_model("qwen3").save_pretrained(tmp_path / "model")
    args = settings(tmp_path, kernel_assertion="strict")
    with pytest.raises(KernelAssertionError, match="the model will not load without it"):
        require_kernels(str(tmp_path / "model"), args, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("given", [TrainerCallback(), (TrainerCallback(),)], ids=["one", "a tuple"])
def test_callbacks_that_are_no_list_are_refused_with_the_one_to_write(given):
    with pytest.raises(ConfigurationError, match=r"(?s)not a list.*callbacks=\[(TrainerCallback\()?\.\.\."):
        require_parts(None, callbacks=given)


def test_a_config_that_is_nowhere_is_left_to_the_loading_to_name(tmp_path):
    require_kernels(str(tmp_path / "nowhere"), settings(tmp_path, kernel_assertion="strict"))


@pytest.mark.parametrize(
    ("method", "adapted", "capability", "mend"),
    [
        ("fp8", False, (9, 0), "16 bits .*FineGrainedFP8Config.dequantize=True.*use_peft"),
        ("fp8", True, (9, 0), None),
        ("fp8", False, (8, 0), None),  # loaded in 16 bits
        ("fp8", False, None, None),
        ("nvfp4", True, (10, 0), "name the model in 16 bits"),
        ("gptq", False, (8, 0), "peft_config"),
        ("bitsandbytes", True, (8, 0), None),
        ("torchao", False, (9, 0), None),
    ],
)
def test_a_checkpoint_that_is_stored_quantized_is_refused_where_transformers_would_not_train_it(
    tmp_path, method, adapted, capability, mend
):
    config = AutoConfig.for_model("llama", quantization_config={"quant_method": method})
    if mend is None:
        refuse_stored_quantized(config, adapted=adapted, given=False, capability=lambda: capability)
        return
    refuse_stored_quantized(config, adapted=adapted, given=True, capability=lambda: capability)
    with pytest.raises(ConfigurationError, match=mend):
        refuse_stored_quantized(config, adapted=adapted, given=False, capability=lambda: capability)
    if capability == (8, 0):  # on a CPU as well
        config.save_pretrained(tmp_path / "model")
        with pytest.raises(ConfigurationError, match=mend):
            require_kernels(str(tmp_path / "model"), settings(tmp_path, kernel_assertion="off"), adapted=adapted)


def test_a_model_that_is_not_there_is_proven_on_a_skeleton_and_the_jobs_random_state_stays(folder):
    state = torch.random.get_rng_state()
    checks, changed = probe_config(
        AutoConfig.from_pretrained(folder), device=torch.device("cpu"), dtype=torch.float32, tokens_per_batch=64
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {check.function for check in checks} == {"attention", "causal_conv1d_fn", "chunk_gated_delta_rule"}
    assert "ran both ways on cpu in float32" in next(c.evidence for c in checks if c.function == "attention")
    assert changed == ()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(580)
def test_v50_on_a_gpu_a_27b_config_is_proven_in_a_minute_once_warm_and_leaves_no_memory(tmp_path):
    pytest.importorskip("fla")
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)]
    config = Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17_408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128, layer_types=kinds,
    )  # fmt: skip
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    args = settings(tmp_path, use_cpu=False, tokens_per_batch=8192)
    before = torch.cuda.memory_allocated()
    require_kernels(str(tmp_path / "model"), args)  # compiles
    state, began = torch.cuda.get_rng_state(), time.perf_counter()
    require_kernels(str(tmp_path / "model"), args)
    assert time.perf_counter() - began < 60
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() - before < 256 << 20  # workspaces of cuBLAS and Triton; the skeleton has 3 GB

    wrapper = sys.modules["transformers.models.qwen3_5.modeling_qwen3_5"].torch_chunk_gated_delta_rule
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("implementation")]
    original = cell.cell_contents

    @functools.wraps(original)
    def broken(*arguments, **keywords):
        raise RuntimeError("no kernel image is available for execution on the device")

    cell.cell_contents = broken
    try:
        with pytest.raises(KernelAssertionError, match="no kernel image is available"):
            require_kernels(str(tmp_path / "model"), args)
    finally:
        cell.cell_contents = original


def test_the_recipe_asks_before_it_loads_tokenizer_model_or_data(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen27b_sft, "use_all_cores", lambda args: 1)  # the cores of the other tests
    (tmp_path / "job.yaml").write_text(
        f"model_name_or_path: {folder}\ndataset_name: {folder}\noutput_dir: {tmp_path / 'run'}\n"
        "use_cpu: true\nbf16: false\ntokens_per_batch: 32\nreport_to: none\nkernel_assertion: strict\n"
    )
    with pytest.raises(KernelAssertionError, match="would run the reference implementation"):
        qwen27b_sft.main(["--config", str(tmp_path / "job.yaml")])


@pytest.mark.parametrize(("version", "fits"), [("0.17.2", False), ("0.18.2", True), ("0.19.0", False), (None, False)])
def test_v46_a_client_for_hub_kernels_that_transformers_does_not_take_is_named(monkeypatch, version, fits):
    monkeypatch.setattr(optional_packages, "installed_version", lambda package: version)
    said = f"is {version}: transformers takes" if version else "is not installed"
    with nullcontext() if fits else pytest.raises(ConfigurationError, match=said):
        optional_packages.require_attention("owner/kernel")
