"""The Trainer you have, with three lines more: proof before step 1, honest rates in every log row."""

import tiny
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from hf_speedkit import KernelAssertionCallback, ThroughputCallback, attach

tokenizer = tiny.tokenizer()
dataset = tiny.chats().map(
    lambda row: {"input_ids": tokenizer.apply_chat_template(row["messages"])["input_ids"]}, remove_columns="messages"
)
dataset = dataset.map(lambda row: {"labels": row["input_ids"]})

trainer = Trainer(
    model=tiny.model(),
    args=TrainingArguments(
        "runs/existing_trainer", max_steps=6, logging_steps=2, use_cpu=True, save_strategy="no", report_to="none"
    ),
    train_dataset=dataset,
    data_collator=DataCollatorForSeq2Seq(tokenizer),
)
attach(trainer, KernelAssertionCallback(), ThroughputCallback())
trainer.train()

row = [logged for logged in trainer.state.log_history if "loss" in logged][-1]
print(f"slots/s {row['speed/slots_per_second']:,.0f}, real tokens/s {row['speed/real_tokens_per_second']:,.0f}: "
      f"{1 - row['speed/packing_efficiency']:.0%} of what was computed is padding")  # fmt: skip
