"""Conversations of a few words, a tokenizer of those words, and templates with and without markers."""

from datasets import Dataset
from support import VOCABULARY, tiny_llama
from transformers import PreTrainedTokenizerFast

from hf_speedkit import SpeedSFTConfig, SpeedSFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", "user:", "assistant:", "<t>", "</t>", "system:", "tool:", "call", "Reasoning",
         "effort", "is", "set", "to", "xhigh", "ok", "null"]  # fmt: skip

PROMPT = "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + ' <eos> ' }}{% endfor %}" + PROMPT

# The space stays outside the markers: transformers marks everything behind a span that does not end on a token.
MARKED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' <eos>' }}"
    "{% endgeneration %}{% else %}{{ m.content + ' <eos>' }}{% endif %}{{ ' ' }}{% endfor %}" + PROMPT
)

# What the prompt supplies at inference, an empty reasoning block, is inside the markers.
BOILERPLATE = MARKED.replace("{% generation %}{{ m.content", "{% generation %}{{ '<t> </t> ' + m.content").replace(
    "{{ 'assistant: ' }}{% endif %}", "{{ 'assistant: <t> </t> ' }}{% endif %}"
)

# The block is there only once there is an answer.
ONLY_WITH_ANSWER = PLAIN.replace(
    "{{ m.role + ': ' +", "{{ m.role + ': ' + ('<t> </t> ' if m.role == 'assistant' else '') +"
)

REASONING_LINE = (
    "{% if enable_thinking is undefined or enable_thinking %}"
    "{{ 'system: Reasoning effort is set to xhigh <eos> ' }}{% endif %}" + PLAIN
)


def tokenizer_with(template):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = WORDS + [f"w{i}" for i in range(VOCABULARY - len(WORDS))]
    built = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    built.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def chats(number=3, answer="w4 w5 w6"):
    return Dataset.from_list([{"messages": chat(f"w{i} w1 w2", answer, "w3 w1", answer)} for i in range(number)])


def completions(number=5):
    return Dataset.from_list(
        [{"prompt": chat(f"w{i} w1"), "completion": [{"role": "assistant", "content": "ok"}]} for i in range(number)]
    )


def trainer_for(path, dataset, template, **changes):
    values = {
        "output_dir": str(path), "use_cpu": True, "bf16": False, "tokens_per_batch": 64, "disable_tqdm": True,
        "activation_checkpointing": False, "save_strategy": "no", "max_steps": 1, "report_to": "none",
    }  # fmt: skip
    return SpeedSFTTrainer(
        model=tiny_llama(),
        args=SpeedSFTConfig(**{**values, **changes}),
        train_dataset=dataset,
        processing_class=tokenizer_with(template),
    )
