import re
from contextlib import nullcontext

import pytest
from support import tiny_hybrid, tiny_llama, tiny_tokenizer, tokenized
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as PaddingOrNot

from hf_speedkit import KernelAssertionCallback, PackedCollator, attach
from hf_speedkit.core.errors import ConfigurationError, KernelAssertionError, PackingError
from hf_speedkit.core.records import KernelVerdict
from hf_speedkit.kernels.requirements import FUNCTIONS
from hf_speedkit.trainer.kernel_callback import packed_slots


def plain_trainer(path, model):
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(path), use_cpu=True, max_steps=1, disable_tqdm=True, report_to="none", save_strategy="no"
        ),
        train_dataset=tokenized([5, 9, 7, 4]),
        data_collator=DataCollatorForSeq2Seq(tiny_tokenizer()),
    )


@pytest.mark.parametrize("packed", [False, True])
def test_v45_the_refusal_names_both_functions_and_the_callbacks_own_way_on(tmp_path, packed):
    trainer = plain_trainer(tmp_path, tiny_hybrid())
    trainer.args.packing = packed
    attach(trainer, KernelAssertionCallback())
    with pytest.raises(KernelAssertionError) as refused:
        trainer.train()
    way_on = 'packing=False and KernelAssertionCallback(mode="warn"), or SpeedSFTTrainer'
    if not packed:
        way_on = 'KernelAssertionCallback(mode="warn"), which is right on a CPU'
    for word in (
        "causal_conv1d_fn",
        "chunk_gated_delta_rule",
        "on a machine with a GPU:\n          pip install",
        way_on,
    ):
        assert word in str(refused.value)
    assert "kernel_assertion=" not in str(refused.value)


@pytest.mark.parametrize(
    ("packing", "collator", "refused"),
    [
        (True, None, "causal_conv1d_fn and chunk_gated_delta_rule"),
        (False, DataCollatorWithFlattening(return_seq_idx=True), "causal_conv1d_fn refuses"),
        (False, PackedCollator(0, 32), "causal_conv1d_fn and chunk_gated_delta_rule"),
        (False, DataCollatorWithFlattening(), None),  # it leaks, which is said, and trains
    ],
    ids=["packing", "flattened", "our collator", "without boundaries"],
)
def test_v45_packed_rows_that_step_1_would_refuse_are_refused_before_it_in_any_mode(
    tmp_path, caplog, packing, collator, refused
):
    trainer = plain_trainer(tmp_path, tiny_hybrid())
    trainer.args.packing = packing
    trainer.data_collator = collator or trainer.data_collator
    trainer.args.neftune_noise_alpha = 5.0
    attach(trainer, KernelAssertionCallback(mode="warn", probe=False))
    if refused is None:
        trainer.train()
        assert "without return_seq_idx" in caplog.text
        assert "the noise shrinks with the length of the whole row" in caplog.text
        return
    with pytest.raises(KernelAssertionError, match=f"{refused}.*(?s:.*)Mend it:  pip install(?s:.*)SpeedSFTTrainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("switches", "missing"),
    [
        ({}, "return_seq_idx and return_flash_attn_kwargs"),
        ({"return_flash_attn_kwargs": True}, "without return_seq_idx"),
        ({"return_seq_idx": True, "return_flash_attn_kwargs": True}, None),
    ],
)
def test_v47_rows_that_a_collator_flattens_need_the_boundaries_that_recurrent_layers_read(tmp_path, switches, missing):
    trainer = plain_trainer(tmp_path, tiny_hybrid())
    trainer.data_collator = DataCollatorWithFlattening(**switches)
    callback = KernelAssertionCallback(probe=False)
    attach(trainer, callback)
    with pytest.raises(KernelAssertionError) as refused:  # a CPU has no fused kernels either
        trainer.train()
    assert missing is None or missing in str(refused.value)
    assert ("packed_rows" in str(refused.value)) is (missing is not None)
    assert "packing=False" in str(refused.value)


def test_v11_a_family_that_leaks_is_refused_with_our_collator_in_a_plain_trainer(tmp_path):
    model = tiny_llama()
    model.config.model_type = "opt"
    trainer = plain_trainer(tmp_path, model)
    trainer.data_collator = PackedCollator(0, 32)
    attach(trainer, KernelAssertionCallback(probe=False))
    with pytest.raises(KernelAssertionError, match="packed documents of opt are not kept apart") as refused:
        trainer.train()
    assert refused.value.mend.startswith("packing=False")  # on a GPU as here


@pytest.mark.parametrize(("mode", "checks"), [("warn", True), ("off", False)])
def test_the_other_modes_let_training_run(tmp_path, caplog, mode, checks):
    trainer = plain_trainer(tmp_path, tiny_hybrid())
    callback = KernelAssertionCallback(mode=mode)
    attach(trainer, callback)
    trainer.train()
    assert trainer.state.global_step == 1
    assert any(check.verdict is KernelVerdict.FALLBACK for check in callback.checks) is checks
    assert ("Mend it:  on a machine with a GPU:" in caplog.text) is checks
    assert "Go on all the same" not in caplog.text


def test_a_model_without_optional_kernels_passes_in_strict_mode(tmp_path):
    trainer = plain_trainer(tmp_path, tiny_llama())
    attach(trainer, KernelAssertionCallback(mode="strict"))
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("requirements", "refused"),
    [
        ("attention", None),
        ((), None),
        (("attention", "chunk_gated_delta_rule"), "chunk_gated_delta_rule   FALLBACK"),
        ((FUNCTIONS["causal_conv1d_fn"],), "causal_conv1d_fn   FALLBACK"),
        (
            ("chunk_gated_delta_rull",),
            "it is required, and no layer of this model was seen to call it [found: attention, ",
        ),
    ],
    ids=["what_is_fused", "nothing", "one_that_is_not", "as_a_record", "misspelt"],
)
def test_only_what_is_required_is_refused_and_the_rest_is_warned_about(tmp_path, caplog, requirements, refused):
    trainer = plain_trainer(tmp_path, tiny_hybrid())
    attach(trainer, KernelAssertionCallback(requirements=requirements))
    if refused is not None:
        with pytest.raises(KernelAssertionError, match=re.escape(refused)):
            trainer.train()
        return
    trainer.train()
    assert trainer.state.global_step == 1
    assert caplog.text.count("chunk_gated_delta_rule   FALLBACK") == 1


@pytest.mark.parametrize("requirements", [(None,), 3, [b"attention"]], ids=["none", "number", "bytes"])
def test_requirements_that_name_nothing_are_refused(requirements):
    with pytest.raises(ConfigurationError, match="are names of functions"):
        KernelAssertionCallback(requirements=requirements)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match='"strict", "warn" or "off"'):
        KernelAssertionCallback(mode="loose")


@pytest.mark.parametrize(
    ("collator", "pads"),
    [(DataCollatorForSeq2Seq(tiny_tokenizer()), True), (PaddingOrNot(0, padding_free=False), True),
     (PaddingOrNot(0, padding_free=True), False)],
    ids=["transformers", "TRL padded", "TRL padding-free"],
)  # fmt: skip
def test_v10_a_collator_that_pads_under_a_config_that_packs_is_refused(tmp_path, caplog, collator, pads):
    """Whoever puts a collator of their own in the trainer's place turns packing off, and every flag still says on."""
    for mode in ("strict", "warn"):
        trainer = plain_trainer(tmp_path, tiny_llama())
        trainer.args.padding_free, trainer.data_collator = True, collator
        attach(trainer, KernelAssertionCallback(mode=mode, probe=False))
        refused = pads and mode == "strict"
        with pytest.raises(PackingError, match=f"{type(collator).__name__}, pads") if refused else nullcontext():
            trainer.train()
    assert ("pads" in caplog.text) is pads


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, None),
        ({"packing": True}, 2 * 512),
        ({"packing": True, "packing_strategy": "wrapped"}, None),
        ({"padding_free": True}, 2 * 512),
    ],
    ids=["padded", "packed", "wrapped", "padding_free"],
)
def test_v11_a_plain_trainer_that_packs_is_asked_about_packed_rows(tmp_path, settings, slots):
    """A family that loses its boundaries passed here: the callback did not say that rows are packed."""
    args = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=512, per_device_train_batch_size=2, **settings
    )
    assert packed_slots(args) == slots
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8, intermediate_size=8)
    model = LlamaForCausalLM(config)
    config.model_type = "opt"  # one of those that leak
    for requirements in (None, ("attention",)):  # wrong, and not only slow: whatever is insisted on
        callback = KernelAssertionCallback(probe=False, requirements=requirements)
        refused = pytest.raises(KernelAssertionError, match="packed_rows   NO_BOUNDARIES")
        with nullcontext() if slots is None else refused:
            callback.on_train_begin(args, None, None, model=model)
