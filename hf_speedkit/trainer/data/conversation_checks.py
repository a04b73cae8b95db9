"""What a chat template does to training data, checked on a sample before anything is tokenized.

Three things go wrong without a word: a template writes a line into every conversation that nobody asked for, a
conversation is trained on in another form than the model will see it in, and tokens become targets that the prompt
supplies at inference. All of them show when a conversation is rendered twice and the two texts are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hf_speedkit.core.errors import ConfigurationError, DatasetError, SpeedkitError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[..., str]
"""render(messages, add_generation_prompt=False, **template_kwargs) -> text."""

SAMPLE_ROWS = 100
"""Conversations looked at: rendering takes about a millisecond each."""

_CHATML = {"from": "role", "value": "content"}
_TOLERATED_SHARE = 0.01
_REASONING_LINE = "Reasoning effort is set to"
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class TurnDifference:
    """Where the text that is trained on leaves the text that the model will see.

    Args:
        example: number of the conversation in the sample, from 0.
        turn: assistant turn in which they part, from 1.
        trained: what training has there.
        seen: what inference has there.
    """

    example: int
    turn: int
    trained: str
    seen: str

    def sentence(self) -> str:
        """The difference in one line."""
        return (
            f"conversation {self.example}, assistant turn {self.turn}: trained on {self.trained!r}, "
            f"at inference {self.seen!r}"
        )


def conversations_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Messages, dict[str, Any]]]:
    """Messages and template arguments of the first rows; rows that are not conversations are left out.

    A prompt-completion row becomes one conversation. `tools` travel with the arguments, and `from` and `value` become
    `role` and `content`, as TRL's tokenization has it.
    """
    found: list[tuple[Messages, dict[str, Any]]] = []
    for row in islice(rows, SAMPLE_ROWS):
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
            messages: Any = [*row["prompt"], *row["completion"]]
        else:
            messages = row.get("messages") or row.get("conversations")
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            continue
        messages = [{_CHATML.get(key, key): value for key, value in message.items()} for message in messages]
        if not all("role" in message for message in messages):
            continue
        arguments = dict(row.get("chat_template_kwargs") or {})
        if row.get("tools"):
            arguments["tools"] = _tools(row["tools"])
        found.append((messages, arguments))
    return found


def refuse_reasoning_line(conversations: Sequence[tuple[Messages, dict[str, Any]]], render: Render) -> None:
    """Refuse a template that writes a line on reasoning effort into conversations whose owner did not ask for one.

    Qwen3.8's does unless told otherwise: 42 tokens in front of every conversation (3.3 % of ultrachat_200k), which
    teach a model to answer without thinking under an instruction to think hard.

    Raises:
        ConfigurationError: the line is there, and neither `enable_thinking` nor `reasoning_effort` was given.
        DatasetError: a conversation that the template refuses.
    """
    for messages, arguments in conversations:
        if {"enable_thinking", "reasoning_effort"} & set(arguments):
            continue
        if any(_REASONING_LINE in str(message.get("content")) for message in messages):
            continue
        text = _whole(render, messages, arguments)
        if _REASONING_LINE in text:
            line = text[text.index(_REASONING_LINE) :].split("\n")[0].split("<|")[0]
            raise ConfigurationError(
                "the chat template writes a line on reasoning effort into every conversation",
                evidence=(f"{line[: 2 * _SHOWN_CHARACTERS]!r}",),
                mend="""chat_template_kwargs={"enable_thinking": False}; of the recipe: --chat_template_kwargs """
                """'{"enable_thinking": false}'""",
                regardless='chat_template_kwargs={"reasoning_effort": "xhigh"} says that you want it',
            )


def rendering_differences(
    conversations: Sequence[tuple[Messages, dict[str, Any]]], train: Render, infer: Render
) -> list[TurnDifference]:
    """Compare what is trained on with what the model will see, up to each assistant turn.

    Args:
        conversations: see `conversations_of`.
        train: renders as training does (TRL may use a template of its own, with markers for assistant turns).
        infer: renders with the tokenizer's own template.

    Returns:
        At most one difference a conversation, the first: a prompt that is no prefix of the text trained on, or text
        that only the template puts between prompt and answer, so that training has it and inference does not.

    Raises:
        DatasetError: a conversation that the template refuses.
    """
    found = []
    for example, (messages, arguments) in enumerate(conversations):
        difference = _difference(example, messages, arguments, train, infer)
        if difference is not None:
            found.append(difference)
    return found


def judge_differences(differences: Sequence[TurnDifference], checked: int, *, prompts: bool) -> str | None:
    """What to say about differences: None where there are none.

    Args:
        differences: of `rendering_differences`.
        checked: conversations looked at.
        prompts: the data are prompts and completions, where the completion is found as what follows the prompt: a
            prompt that is no prefix makes the mask wrong.

    Returns:
        The warning, where training may go on.

    Raises:
        DatasetError: more than 1 % of prompts differ.
    """
    if not differences:
        return None
    what = f"{len(differences)} of {checked} conversations are trained on in another form than the model will see them"
    if prompts and len(differences) > _TOLERATED_SHARE * checked:
        raise DatasetError(
            what,
            evidence=(differences[0].sentence(), "completions are masked by where the prompt ends"),
            mend='make both renders agree, e.g. chat_template_kwargs={"enable_thinking": False}',
            regardless='template_check="warn"',
        )
    return f"{what}. {differences[0].sentence()}"


def generation_prompt_spans(
    messages: Messages, arguments: Mapping[str, Any], train: Render, infer: Render
) -> list[tuple[int, int]]:
    """Character spans of the text trained on that the prompt supplies at inference, one an assistant turn.

    From the end of the messages before the turn to the end of the generation prompt; a turn whose prompt is no prefix
    of the text has none.
    """
    text = train(messages, **arguments)
    spans = []
    for turn in _assistant_turns(messages):
        before, prompt = rendered_or_none(train, messages[:turn], arguments), _prompt(infer, messages[:turn], arguments)
        if prompt is not None and text.startswith(prompt):
            spans.append((len(before) if before is not None and prompt.startswith(before) else 0, len(prompt)))
    return spans


def _difference(
    example: int, messages: Messages, arguments: Mapping[str, Any], train: Render, infer: Render
) -> TurnDifference | None:
    text = _whole(train, messages, arguments)
    turns = _assistant_turns(messages)
    # What the model sees before each answer, and the conversation as a whole, which holds the last answer too.
    seen = [_prompt(infer, messages[:turn], arguments) for turn in turns]
    for number, (turn, prompt) in enumerate(zip(turns, seen, strict=True), start=1):
        if prompt is None:
            continue
        if not text.startswith(prompt):
            return _parted(example, text, prompt, messages, arguments, train)
        added = _added_before_answer(text[len(prompt) :], messages[turn])
        if added:
            return TurnDifference(example, number, added[:_SHOWN_CHARACTERS], "")
    whole = rendered_or_none(infer, messages, arguments)
    if whole is not None and turns and whole.strip() != text.strip():
        return _parted(example, text, whole, messages, arguments, train)
    return None


def _parted(
    example: int, text: str, seen: str, messages: Messages, arguments: Mapping[str, Any], train: Render
) -> TurnDifference:
    """The difference at the first character that differs, with the turn that it lies in."""
    at = next((i for i, (a, b) in enumerate(zip(text, seen, strict=False)) if a != b), min(len(text), len(seen)))
    turns = _assistant_turns(messages)
    ends = (rendered_or_none(train, messages[: turn + 1], arguments) for turn in turns)
    number = next((i for i, end in enumerate(ends, start=1) if end is not None and at < len(end)), len(turns))
    return TurnDifference(example, number, _shown(text, at), _shown(seen, at))


def _added_before_answer(rest: str, message: Mapping[str, Any]) -> str:
    """What the template alone put in front of an answer; reasoning that the message brings is not the template's."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return ""
    added = rest[: max(0, rest.find(content.strip()))]
    brought = [value for key, value in message.items() if key not in {"role", "content"} and isinstance(value, str)]
    return "" if any(value.strip() and value.strip() in added for value in brought) else added.strip()


def _assistant_turns(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]


def _prompt(infer: Render, messages: Messages, arguments: Mapping[str, Any]) -> str | None:
    return rendered_or_none(infer, messages, {**arguments, "add_generation_prompt": True})


def unrenderable(messages: Messages, error: Exception, *, row: int | None = None) -> DatasetError:
    """The refusal of a conversation that its template cannot write, with what the template said.

    Args:
        messages: the conversation.
        error: what the template raised.
        row: its number in the dataset, from 0, where it is known.
    """
    roles = ", ".join(str(message.get("role")) for message in messages[:8])
    begins = str(messages[0].get("content"))[:_SHOWN_CHARACTERS] if messages else ""
    return DatasetError(
        f"the chat template refuses {'a conversation' if row is None else f'the conversation of row {row:,}'}: {error}",
        evidence=(f"its roles: {roles}{', ...' if len(messages) > 8 else ''}", f"it begins with {begins!r}"),
        mend=_other_arguments(messages, str(error))
        or "change or filter such conversations; the template says which roles and contents it takes",
    )


def _other_arguments(messages: Messages, said: str) -> str | None:
    """The mend where a template wants the arguments of calls as an object and has a text, or the other way round."""
    given = [arguments_of(call) for call in calls_of(messages)]
    into = 'call["function"]["arguments"] = json.'
    if any(isinstance(one, str) for one in given) and ("mapping" in said or "'items'" in said):
        return f'{into}loads(...) for each call, then Dataset.from_list(rows, on_mixed_types="use_json")'
    if any(isinstance(one, Mapping) for one in given) and 'not "dict"' in said:
        return f"{into}dumps(...) for each call: the template writes arguments as the text that they are"
    return None


def calls_of(messages: Messages) -> list[Mapping[str, Any]]:
    """The calls of tools in messages; what has another form (one text of JSON) is none."""
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return [call for call in calls if isinstance(call, Mapping)]


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, beside the function's name or inside `function`."""
    function = call.get("function")
    return (function if isinstance(function, Mapping) else call).get("arguments")


def _whole(render: Render, messages: Messages, arguments: Mapping[str, Any]) -> str:
    try:
        return render(messages, **arguments)
    except SpeedkitError:
        raise
    except Exception as error:  # filters raise TypeError for contents of another type, and a template anything
        raise unrenderable(messages, error) from error


def rendered_or_none(render: Render, messages: Messages, arguments: Mapping[str, Any]) -> str | None:
    """The text, or None for a beginning that the template refuses (a system message alone, for example)."""
    try:
        return render(messages, **arguments)
    except SpeedkitError:
        raise
    except Exception:  # noqa: BLE001 - see `_whole`; whoever needs the reason renders the whole conversation
        return None


def _shown(text: str, at: int) -> str:
    return text[max(0, at - 10) : at + _SHOWN_CHARACTERS]


def _tools(tools: Any) -> Any:
    import json

    try:
        return json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise DatasetError(
            f'"tools" of a row are a text that is no JSON: {error}',
            evidence=(f"found {tools[:_SHOWN_CHARACTERS]!r}",),
            mend="pass a list of tools, or that list as JSON text",
        ) from error
