"""Only the answers are learnt: prompt and completion columns, packed; the mask is checked before step 1."""

import tiny
from datasets import Dataset

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in tiny.chats()]
trainer = SpeedSFTTrainer(
    model=tiny.model(),
    args=SpeedSFTConfig(
        tiny.folder("completion_only"), tokens_per_batch=512, completion_only_loss=True, max_steps=4, logging_steps=2,
        use_cpu=True, bf16=False, save_strategy="no", report_to="none",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tiny.tokenizer(),
)  # fmt: skip
trainer.train()
row = [logged for logged in trainer.state.log_history if "loss" in logged][-1]
print(f"{row['speed/target_share']:.0%} of real tokens are targets; isolated: {trainer.summary().isolation.passed}")
