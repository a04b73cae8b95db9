"""Where a model's weights come from: drawn as the model itself would, read once, or waited for."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import AutoModelForCausalLM
from trl import ModelConfig
from trl.trainer import sft_trainer

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.core.errors import ConfigurationError, SpeedkitError
from hf_speedkit.trainer import weights
from hf_speedkit.trainer.weights import empty_model, load_model, random_model, receives_weights
from hf_speedkit.trainer.whole_weights import checked_loading

BUILDERS = {"hybrid": tiny_hybrid, "llama": tiny_llama}


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("kind", sorted(BUILDERS))
def test_drawn_weights_have_the_statistics_of_the_models_own_initialisation(kind):
    # The smallest matrix has 128 draws: two spreads of it differ by 9 % (one sigma), so 20 % is allowed.
    config = BUILDERS[kind]().config
    torch.manual_seed(0)
    own = tensors(AutoModelForCausalLM.from_config(config))
    drawn = tensors(random_model(config, device="cpu", dtype=torch.float32, seed=1))
    assert own.keys() == drawn.keys()
    for name, value in own.items():
        mine = drawn[name]
        assert (mine.shape, mine.dtype, mine.device) == (value.shape, value.dtype, value.device), name
        if value.dim() > 1:
            assert mine.std().item() == pytest.approx(value.std().item(), rel=0.2), name
            assert not torch.equal(mine, value), name  # another seed
        elif not name.endswith("A_log"):  # norms, dt_bias, inv_freq: constants
            assert torch.equal(mine, value), name
        else:  # log of uniform(0.01, 16)
            assert mine.isfinite().all()
            assert mine.exp().min() >= 0.0099
            assert mine.exp().max() <= 16.01


def test_one_seed_gives_one_model_and_leaves_the_callers_draws_alone():
    config = tiny_hybrid().config
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = random_model(config, device="cpu", dtype=torch.bfloat16, seed=1)
    assert torch.equal(torch.rand(3), expected)
    second = random_model(config, device="cpu", dtype=torch.bfloat16, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    assert first.model.rotary_emb.inv_freq.dtype == torch.float32  # positions in bf16 would be wrong above 256


def test_tied_weights_stay_tied():
    config = tiny_hybrid(tie_word_embeddings=True).config
    for model in (
        random_model(config, device="cpu", dtype=torch.float32),
        empty_model(config, dtype=torch.float32),
    ):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_weight_that_the_initialisation_leaves_out_is_named(monkeypatch):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5PreTrainedModel

    monkeypatch.setattr(Qwen3_5PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(ConfigurationError, match=r"does not say how .*weight is initialised"):
        random_model(tiny_hybrid().config, device="cpu", dtype=torch.float32)


def test_a_shell_has_the_layout_of_the_model_and_no_two_parameters_at_one_address():
    reference = tiny_hybrid().to(torch.bfloat16)
    shell = empty_model(reference.config, dtype=torch.bfloat16)
    described = {name: (p.shape, p.dtype) for name, p in shell.state_dict().items()}
    assert described == {name: (p.shape, p.dtype) for name, p in reference.state_dict().items()}
    # accelerate finds the optimizer's parameters again by address; on the meta device all of them are 0.
    addresses = [p.data_ptr() for p in shell.parameters()]
    assert 0 not in addresses
    assert len(set(addresses)) == len(addresses)
    assert torch.equal(shell.model.rotary_emb.inv_freq, tiny_hybrid().model.rotary_emb.inv_freq)


def test_weights_that_never_came_cannot_be_missed():
    shell = empty_model(tiny_hybrid().config, dtype=torch.float32)
    assert shell(input_ids=torch.tensor([[2, 3, 4]])).logits.isnan().all()


PLUGIN = {"fsdp_version": 2, "cpu_ram_efficient_loading": True}


@pytest.mark.parametrize(
    ("plugin", "environment", "device", "rank", "expected"),
    [
        (PLUGIN, {}, "cuda", 1, True),
        (PLUGIN, {}, "cuda", 0, False),  # the one that sends
        (PLUGIN, {}, "cpu", 1, False),  # accelerate ignores FSDP on a CPU
        ({**PLUGIN, "cpu_ram_efficient_loading": False}, {}, "cuda", 1, False),
        (None, {}, "cuda", 1, False),
        (None, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "cuda", 1, False),
        (
            None,
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "cuda",
            1,
            True,
        ),
    ],
)
def test_a_process_waits_for_weights_only_where_accelerate_sends_them(
    monkeypatch, plugin, environment, device, rank, expected
):
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # The plugin writes its answer into the environment: let monkeypatch put that back.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false"))
    args = SimpleNamespace(
        world_size=2, process_index=rank, device=torch.device(device), fsdp_plugin_args=plugin, seed=0
    )
    assert receives_weights(args) is expected
    assert receives_weights(args, quantized=True) is False


def test_random_weights_cannot_be_quantized(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be quantized"):
        load_model(ModelConfig(model_name_or_path=str(tmp_path), load_in_4bit=True), None, random_weights=True)


def test_weights_that_are_not_there_are_told_in_one_message(tmp_path):
    tiny_llama().config.save_pretrained(tmp_path)
    named = ModelConfig(model_name_or_path=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"no model can be loaded from .*\n.*model\.safetensors"):
        load_model(named, settings(tmp_path), receives=False)


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def a_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def configured(**values):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def by_recipe(folder):
    load_model(ModelConfig(model_name_or_path=str(folder)), settings(folder), receives=False)


def by_trainer(folder):
    given = {"train_dataset": tokenized([9, 5]), "processing_class": tiny_tokenizer()}
    trainer = SpeedSFTTrainer(model=str(folder), args=settings(folder / "run"), **given)
    assert trainer.model.device.type == "cpu"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_short, "the weights of .* cannot be read(.|\n)*git lfs pull, or copy the files again"),
        (a_pointer, "the weights of .* cannot be read(.|\n)*git lfs pull, or copy the files again"),
        (configured(hidden_size=16), "the weights of .* cannot be read(.|\n)*the config.json of these weights"),
        (configured(num_hidden_layers=3), "lacks 9 of the model's .. weights(.|\n)*the first: model.layers.2"),
    ],
    ids=["cut short", "lfs pointer", "other sizes", "a layer missing"],
)
@pytest.mark.parametrize("loads", [by_recipe, by_trainer])
def test_weights_that_are_damaged_or_not_all_there_are_refused_before_they_are_trained(tmp_path, loads, damage, told):
    tiny_llama().save_pretrained(tmp_path)
    own = sft_trainer.create_model_from_path
    loads(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigurationError, match=told):
        loads(tmp_path)
    assert sft_trainer.create_model_from_path is own


def test_models_that_are_loaded_at_once_are_loaded_once_each(tmp_path):
    """A callback of one trainer that makes another, or two threads: the loader in TRL's place is there already."""
    tiny_llama().save_pretrained(tmp_path)
    own = sft_trainer.create_model_from_path
    with checked_loading(), checked_loading():
        model = sft_trainer.create_model_from_path(str(tmp_path))
    assert type(model) is type(tiny_llama())
    assert sft_trainer.create_model_from_path is own


def test_layers_that_the_config_leaves_out_are_said(tmp_path, caplog):
    tiny_llama().save_pretrained(tmp_path)
    configured(num_hidden_layers=1)(tmp_path)
    load_model(ModelConfig(model_name_or_path=str(tmp_path)), settings(tmp_path), receives=False)
    assert "9 weights of layers that the model's config does not have are left out" in caplog.text


def settings(path):
    return SpeedSFTConfig(output_dir=str(path), use_cpu=True, bf16=False, tokens_per_batch=32, report_to="none", seed=3)


def test_a_checkpoint_is_read_by_one_process_and_waited_for_by_the_others(tmp_path):
    # Two sharded processes train from such a pair in test_two_process.py.
    written = tiny_hybrid()
    written.save_pretrained(tmp_path)
    named = ModelConfig(model_name_or_path=str(tmp_path), dtype="float32")
    read = load_model(named, settings(tmp_path), receives=False)
    shell = load_model(named, settings(tmp_path), receives=True)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), written.parameters(), strict=True))
    assert all(p.isnan().all() for p in shell.parameters() if p.dim() < 2)


@pytest.mark.parametrize("config", ["", "config.json"], ids=["folder", "config.json"])
def test_drawn_weights_need_a_config_and_follow_the_jobs_seed(tmp_path, config):
    tiny_hybrid().config.save_pretrained(tmp_path)
    named = ModelConfig(model_name_or_path=str(tmp_path / config), dtype="bfloat16", attn_implementation="eager")
    model = load_model(named, settings(tmp_path), random_weights=True)
    expected = random_model(tiny_hybrid().config, device="cpu", dtype=torch.bfloat16, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"), [("auto", "bfloat16", torch.bfloat16), ("float32", "bfloat16", torch.float32)]
)
def test_a_shell_has_the_dtype_that_rank_0_reads(tmp_path, dtype, stored, expected):
    tiny_hybrid().to(getattr(torch, stored)).save_pretrained(tmp_path)
    named = ModelConfig(model_name_or_path=str(tmp_path), dtype=dtype)
    pair = [load_model(named, settings(tmp_path), receives=receives) for receives in (False, True)]
    assert [{p.dtype for p in model.parameters()} for model in pair] == [{expected}] * 2


@pytest.mark.parametrize("other", [{"dtype": torch.bfloat16}, {"dtype": torch.float32, "layers": 8}])
def test_ranks_whose_models_differ_stop_before_anything_is_sent(monkeypatch, other):
    import torch.distributed as dist

    mine = tiny_hybrid()
    dtype, layers = other["dtype"], other.get("layers", 4)
    theirs = tiny_hybrid(layers=layers).to(dtype)

    said = []  # what rank 0 said, and what each rank hears: rank 0's word and its own

    def gather(slots, own):
        said.append(own)
        slots[:] = [said[0], own]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    weights._refuse_other_layouts(mine)
    with pytest.raises(SpeedkitError, match="different names, shapes or dtypes"):
        weights._refuse_other_layouts(theirs)


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.4, False)])
def test_drawn_weights_stay_on_a_device_that_has_the_room(monkeypatch, share, fits):
    model = tiny_llama()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size, 80 * 2**30))
    assert weights._fits(model, torch.device("cuda"), share) is fits
    assert weights._fits(model, torch.device("cpu"), share)
