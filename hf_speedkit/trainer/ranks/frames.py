"""Where a thread is, in words: its innermost line, and the innermost one that is no library's."""

from __future__ import annotations

from types import FrameType

# torch's own collectives, and those of ours that wait (gloo's host does) without a line of torch's around the call.
_COLLECTIVES = ("/torch/distributed/", "/hf_speedkit/trainer/sharded/zero_copy.py")


def describe_frame(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is: its innermost line and, where that is a library's, the innermost one that is not.

    Args:
        frame: from sys._current_frames(); None for a thread that has ended.

    Returns:
        For example "torch/distributed/distributed_c10d.py:2901 all_reduce, called at run/train.py:12 main", and whether
        the innermost line is that of a collective.
    """
    if frame is None:
        return "an unknown line", False
    path = frame.f_code.co_filename.replace("\\", "/")
    waits = any(part in path for part in _COLLECTIVES)
    own: FrameType | None = frame
    while own is not None and _of_a_library(own):
        own = own.f_back
    line = _line(frame)
    return (line if own in (None, frame) else f"{line}, called at {_line(own)}"), waits


def _of_a_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename.replace("\\", "/")
    return "/site-packages/" in path or "/lib/python3" in path or path.startswith("<")


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename.replace("\\", "/")
    short = path.rsplit("/site-packages/", 1)[-1] if "/site-packages/" in path else "/".join(path.split("/")[-2:])
    return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
