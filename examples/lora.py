"""LoRA: the same trainer with a peft_config; packed, proven and measured as before. Needs hf-speedkit[lora]."""

import tiny

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer
from hf_speedkit.trainer.adapters import require_adapters

require_adapters({"use_peft": True})  # without peft: the pip command, in place of an ImportError
from peft import LoraConfig  # noqa: E402

trainer = SpeedSFTTrainer(
    model=tiny.model(),
    args=SpeedSFTConfig(
        tiny.folder("lora"), tokens_per_batch=512, learning_rate=1e-3, max_steps=4, logging_steps=2,
        use_cpu=True, bf16=False, save_strategy="no", report_to="none",
    ),
    train_dataset=tiny.chats(),
    processing_class=tiny.tokenizer(),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
print(f"{trained:,} parameters trained; isolated: {trainer.summary().isolation.passed}")
