"""What conversations hold that nothing follows: marks nobody reads, values Arrow filled in, what templates omit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.packing.boundaries import IGNORE_INDEX
from hf_speedkit.trainer.data.conversation_checks import Messages, Render, rendered_or_none

# By which OpenAI's format, axolotl and ms-swift keep single messages out of the loss.
_MESSAGE_WEIGHTS = ("weight", "train", "training", "loss")
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Characters by which a line is recognized: templates trim, cut control words off and wrap.
_RECOGNIZED = 24
_CLOSING_TAG = re.compile(r"\s*</([^<>\s]+)>")


def refuse_missing_template(tokenizer: Any, conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
    """Refuse conversations where the tokenizer, mostly a base model's, has no chat template to write them with.

    Raises:
        DatasetError: what to do.
    """
    if conversations and not getattr(tokenizer, "chat_template", None):
        raise DatasetError(
            "the data are conversations, and the tokenizer has no chat template",
            mend="the tokenizer of the instruct model, or chat_template_path=FOLDER_OR_FILE.jinja",
        )


def refuse_weighed_messages(conversations: Sequence[tuple[Messages, dict[str, Any]]]) -> None:
    """Refuse messages that are marked as not to train on, which nothing here follows.

    Args:
        conversations: see `conversations_of`.

    Raises:
        DatasetError: names the mark.
    """
    messages = [message for conversation, _ in conversations for message in conversation]
    for key in _MESSAGE_WEIGHTS:
        masked = sum(message.get(key) is not None and not message[key] for message in messages)
        if masked:
            raise DatasetError(
                f'{masked} of {len(messages)} messages have "{key}": 0 or False, which nothing reads',
                evidence=("they would be trained on like the others",),
                mend="pass tokens and labels of your own, -100 where a token is no target; or leave such conversations "
                "out",
                regardless='template_check="warn"',
            )


def refuse_lost_messages(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> None:
    """Refuse messages, calls and tools of which a template writes nothing at all, and contents it writes as Python.

    A template that knows no system role, no tools or no calls leaves them out without a word: the model then learns
    answers without what they answer to. What a template writes in another form (trimmed, as JSON) is no loss.

    Args:
        conversations: see `conversations_of`.
        render: as for training.

    Raises:
        DatasetError: what is lost first, and how many of the conversations lose something.
    """
    lost = [one for one in (_first_loss(messages, arguments, render) for messages, arguments in conversations) if one]
    if lost:
        raise DatasetError(
            f"the chat template leaves out {lost[0]}",
            evidence=(f"{len(lost)} of {len(conversations)} conversations lose something",),
            mend="chat_template_path=FOLDER_OR_FILE.jinja of a template that writes them, or take them out of the data",
            regardless='template_check="warn"',
        )


def _first_loss(messages: Messages, arguments: Mapping[str, Any], render: Render) -> str | None:
    text = rendered_or_none(render, messages, arguments)
    if text is None:
        return None
    seen = one_line(text)
    tools = [str(name) for name in map(function_name, arguments.get("tools") or ()) if name]
    if tools and not any(name in seen for name in tools):
        return f"all tools, such as {tools[0]!r}"
    for message in messages:
        parts = said_in(message.get("content"))
        answer = message["role"] == "assistant"  # see `lost_answers`
        if parts and not answer and not any(written(part, seen) for part in parts):
            return f"what the {message['role']} says: {parts[0][:60]!r}"
        if isinstance(message.get("content"), list) and "{'type': 'text'" in text:
            return "the form of contents in parts, and writes them out as Python: pass each content as one text"
        calls = [str(name) for name in map(function_name, message.get("tool_calls") or ()) if name]
        if calls and not any(name in seen for name in calls):
            return f"the calls of tools, such as that of {calls[0]!r}"
    return None


def lost_answers(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> list[str]:
    """What to say where a template leaves out reasoning, or the text of answers that call tools as well.

    Many do so on purpose, the reasoning of all turns but the last, since at inference it is not shown either. The
    answers are trained on all the same, as answers without reasoning.

    Args:
        conversations: see `conversations_of`.
        render: as for training.
    """
    thoughts, answers = [0, 0], [0, 0]
    for messages, arguments in conversations:
        text = rendered_or_none(render, messages, arguments)
        if text is None:
            continue
        seen = one_line(text)
        for message in messages:
            if message["role"] == "assistant":
                # Thoughts begin alike ("Okay, the user"), so that the beginning of one says nothing about another.
                thought = max("\n".join(_thoughts(message)).splitlines(), key=len, default="")
                thoughts[0] += bool(thought) and one_line(thought) not in seen
                thoughts[1] += bool(thought)
                texts = said_in(message.get("content"))
                answers[0] += bool(texts) and not any(written(text, seen) for text in texts)
                answers[1] += bool(texts)
    said = []
    if thoughts[0]:
        said.append(
            f"the chat template leaves out the reasoning of {thoughts[0]} of {thoughts[1]} turns that have some, and "
            "their answers are trained on without it. To train on it, pass each turn as a prompt and its completion, "
            "or set what the template keeps it by (chat_template_kwargs)"
        )
    if answers[0]:
        said.append(f"the chat template leaves out the text of {answers[0]} of {answers[1]} answers")
    return said


def opened_by_nothing(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> str | None:
    """What to say where reasoning stands outside its block: a tag closes what nothing has opened (case V83).

    Templates that cut a content at the closing tag alone, or forget the opening one of earlier turns, write that; at
    inference the model opens the block itself. Comparing two renders shows nothing where both have the fault.

    Args:
        conversations: see `conversations_of`.
        render: as for training.
    """
    found = [
        (example, turn, tag)
        for example, (messages, arguments) in enumerate(conversations)
        for turn, tag in _strays(messages, rendered_or_none(render, messages, arguments) or "")
    ]
    if not found:
        return None
    example, turn, tag = found[0]
    count = len({example for example, *_ in found})
    return (
        f"the reasoning of {count} of {len(conversations)} conversations is written outside its block: in conversation "
        f"{example}, assistant turn {turn}, </{tag}> closes what no <{tag}> has opened. The model learns to answer so; "
        f"mend the chat template where it drops <{tag}>, or the rows where they lack it"
    )


def _strays(messages: Messages, text: str) -> Iterator[tuple[int, str]]:
    """Assistant turns, from 1, whose reasoning is followed by a closing tag without an open one, and the tag's name."""
    cursor = 0
    answers = (message for message in messages if message["role"] == "assistant")
    for turn, message in enumerate(answers, start=1):
        for thought in map(str.strip, _thoughts(message)):
            at = text.find(thought, cursor)
            closing = _CLOSING_TAG.match(text, at + len(thought)) if at >= 0 else None
            if closing is None:
                continue
            cursor, tag = closing.end(), closing[1]
            if text.rfind(f"<{tag}>", 0, at) <= text.rfind(f"</{tag}>", 0, at):
                yield turn, tag


def _thoughts(message: Mapping[str, Any]) -> list[str]:
    content: Any = message.get("content")
    inside = content.split("</think>")[0].split("<think>")[-1] if _thinks(content) else ""
    found = [message.get(key) for key in _REASONING] + [inside]
    return [thought for thought in found if isinstance(thought, str) and thought.strip()]


def _thinks(content: Any) -> bool:
    return isinstance(content, str) and "</think>" in content


def trained_question_tokens(
    messages: Messages, text: str, offsets: Sequence[tuple[int, int]], labels: Sequence[int]
) -> tuple[int, int]:
    """Tokens of what others than the assistant say: how many are targets, and how many there are.

    Args:
        messages: a conversation.
        text: as it was rendered for training.
        offsets: where each token lies in the text.
        labels: of the tokens, -100 where one is no target.
    """
    spans, cursor = [], 0
    for message in messages:
        for said in said_in(message.get("content")):
            at = text.find(said.strip(), cursor)
            if at >= 0:
                cursor = at + len(said.strip())
                spans += [(at, cursor)] if message["role"] != "assistant" else []
    inside = [
        label != IGNORE_INDEX
        for (start, stop), label in zip(offsets, labels, strict=True)
        if stop > start and any(first <= start and stop <= last for first, last in spans)
    ]
    return sum(inside), len(inside)


def said_in(content: Any) -> list[str]:
    """What a message says, without reasoning in tags: that may be left out on purpose."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    said = [text.rpartition("</think>")[2] if _thinks(text) else text for text in texts if isinstance(text, str)]
    return [text for text in said if text.strip()]


def written(part: str, seen: str) -> bool:
    """Whether a text holds a part, or the beginning or end of one of its lines, as it is or as JSON."""
    lines = [line for line in part.splitlines() if line.strip()]
    forms = [one_line(form) for line in lines for form in (line, json.dumps(line, ensure_ascii=False)[1:-1])]
    return any(form[:_RECOGNIZED] in seen or form[-_RECOGNIZED:] in seen for form in forms)


def one_line(text: str) -> str:
    """A text with one blank in place of every space, so that texts that were wrapped are still the same."""
    return " ".join(text.split())


def function_name(tool: Any) -> Any:
    """The name of a tool, or of the tool that a call is of; None where there is none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None
