"""Who speaks in a conversation: roles that no template knows, roles that are misspelt, and nobody who answers."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_speedkit.core.errors import DatasetError
from hf_speedkit.trainer.data.conversation_checks import Messages, Render, rendered_or_none

ROLES = ("system", "developer", "user", "assistant", "tool")
"""What chat templates know between them; a template that knows another writes its messages out, and is left alone."""

RENAME = (
    'roles = {"human": "user", "gpt": "assistant"}; dataset = dataset.map(lambda row: {"messages": [{"role": '
    'roles.get(m["from"], m["from"]), "content": m["value"]} for m in row["conversations"]]}, '
    'remove_columns="conversations")'
)
_FOREIGN_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
_NEAR = 0.8  # "usr" and "assistent" are; "model", "function" and "observation", which some templates know, are not


def refuse_foreign_roles(
    conversations: Sequence[tuple[Messages, dict[str, Any]]],
    render: Render,
    *,
    rows: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Refuse roles that the template leaves out without a word, such as ShareGPT's "human" and "gpt".

    Args:
        conversations: see `conversations_of`.
        render: as for training.
        rows: those they are of, for the line of code; without them ShareGPT's.

    Raises:
        DatasetError: the roles, and the line of code that renames them.
    """
    for messages, arguments in conversations:
        foreign = [message for message in messages if message["role"] not in ROLES]
        text = rendered_or_none(render, messages, arguments) if foreign else None
        if text is None and {message["role"] for message in messages} & set(_FOREIGN_ROLES):
            raise DatasetError(
                f"the chat template refuses conversations with the roles {', '.join(_roles(messages))}",
                evidence=(f"roles that templates know: {', '.join(ROLES)}",),
                mend=_renaming(messages, rows),
            )
        if text is None:
            continue
        texts = [(str(m["role"]), m["content"].strip()) for m in foreign if isinstance(m.get("content"), str)]
        lost = [role for role, content in texts if content not in text]
        if lost:
            raise DatasetError(
                f"the chat template leaves out every message of {', '.join(map(repr, dict.fromkeys(lost)))}",
                evidence=(f"roles that templates know: {', '.join(ROLES)}",),
                mend=_renaming(messages, rows),
            )


def _roles(messages: Messages) -> dict[str, None]:
    return dict.fromkeys(repr(message["role"]) for message in messages)


def _meant(role: str) -> str:
    """The role that a ShareGPT's or misspelt one stands for; any other stands for itself."""
    if role in ROLES or not role.isalpha():  # "assistant_2" is one of several on purpose
        return role
    near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=_NEAR)
    return _FOREIGN_ROLES.get(role) or (near[0] if near else role)


def _mistaken(messages: Messages) -> dict[str, str]:
    """The roles of messages that stand for another one, and which."""
    meant = {role: _meant(role) for role in (str(message["role"]) for message in messages)}
    return {role: other for role, other in meant.items() if other != role}


def _renaming(messages: Messages, rows: Iterable[Mapping[str, Any]] = ()) -> str:
    """The line of code that gives messages the roles that are meant."""
    wrong = _mistaken(messages)
    own = any(isinstance(turn, Mapping) and "role" in turn for row in rows for turn in row.get("messages") or ())
    if not wrong or (set(wrong) & set(_FOREIGN_ROLES) and not own):
        return RENAME
    return (
        f'roles = {json.dumps(wrong)}; dataset = dataset.map(lambda row: {{"messages": [{{**m, "role": '
        'roles.get(m["role"], m["role"])} for m in row["messages"]]})'
    )


def written_roles(
    conversations: Sequence[tuple[Messages, dict[str, Any]]],
    render: Render,
    *,
    rows: Iterable[Mapping[str, Any]] = (),
) -> str | None:
    """What to say where a template writes out roles that at inference are called otherwise, or where nobody answers.

    Those are ShareGPT's, and misspelt ones.

    Args:
        conversations: see `conversations_of`.
        render: as for training.
        rows: see `refuse_foreign_roles`.
    """
    for messages, arguments in conversations:
        known = [{**m, "role": _meant(str(m["role"]))} for m in messages]
        if known == list(messages):
            continue
        texts = [rendered_or_none(render, one, arguments) for one in (messages, known)]
        if None not in texts and texts[0] != texts[1]:
            strangers = _mistaken(messages)
            return (
                f"the chat template writes the roles {', '.join(map(repr, strangers))} out; at inference they are "
                f"{' and '.join(dict.fromkeys(strangers.values()))}. Rename them: {_renaming(messages, rows)}"
            )
    asking = {"system", "developer", "user", "tool"}
    if conversations and all(str(m["role"]) in asking for messages, _ in conversations for m in messages):
        return (
            f"none of {len(conversations)} conversations looked at has an answer (a message of the role "
            '"assistant"), so questions alone would be learnt'
        )
    return None
