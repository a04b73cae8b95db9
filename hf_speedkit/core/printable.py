"""Text from strangers, made safe to print: names in a trace can hold terminal escapes and direction overrides."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str, *, width: int | None = None) -> str:
    """The text without control characters (C0, C1, ESC), direction overrides and invisible ones.

    Args:
        text: any text.
        width: characters kept; the middle of a longer text gives way to an ellipsis, since the ends of a kernel's
            name say most.
    """
    clean = _UNPRINTABLE.sub("\ufffd", text)
    if width is None or len(clean) <= width:
        return clean
    tail = max(1, (width - 1) // 3)
    return f"{clean[: width - 1 - tail]}…{clean[-tail:]}"
