"""Chats with tool calls: each call keeps its own arguments, and only what the assistant writes is learnt."""

import tiny
from datasets import Dataset

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer


def tool(name, *arguments):
    """A tool as chat templates want it described."""
    properties = {argument: {"type": "string"} for argument in arguments}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def chat(ask, name, arguments, answer):
    """A question, the call it leads to, what the tool says, and the answer."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": name, "content": answer},
            {"role": "assistant", "content": f"{answer}."},
        ],
        "tools": [tool("weather", "city"), tool("time", "zone")],
    }


rows = [
    chat("Weather in Oslo?", "weather", {"city": "Oslo"}, "rain"),
    chat("What time is it in UTC?", "time", {"zone": "UTC"}, "noon"),
] * 16
# Without on_mixed_types Arrow gives every call the arguments of all tools, null where it had none; the template would
# write them out, and SpeedSFTTrainer refuses such data.
dataset = Dataset.from_list(rows, on_mixed_types="use_json")

trainer = SpeedSFTTrainer(
    model=tiny.model(),
    args=SpeedSFTConfig(
        tiny.folder("tool_calls"), tokens_per_batch=2048, assistant_only_loss=True, max_steps=2, logging_steps=1,
        use_cpu=True, bf16=False, save_strategy="no", report_to="none",
    ),
    train_dataset=dataset,
    processing_class=tiny.tokenizer(),
)  # fmt: skip
trainer.train()
row = [logged for logged in trainer.state.log_history if "loss" in logged][-1]
print(f"{row['speed/target_share']:.0%} of real tokens are targets")
