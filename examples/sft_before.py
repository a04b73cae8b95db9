"""A fine-tune with TRL's SFTTrainer. sft_after.py is the same job on hf_speedkit: two lines differ."""

import tiny
from trl import SFTConfig, SFTTrainer

args = SFTConfig(
    output_dir=tiny.folder("sft"),
    max_length=512,
    max_steps=4,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    report_to="none",
)
trainer = SFTTrainer(model=tiny.model(), args=args, train_dataset=tiny.chats(), processing_class=tiny.tokenizer())
trainer.train()
print([key for key in trainer.state.log_history[0] if "token" in key])
