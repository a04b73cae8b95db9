"""Templates that write the day on which they are rendered (Llama 3.2's, gpt-oss's, SmolLM3's): one day for a whole run.

A run that goes on on another day would make other documents of the same conversations, and another order of them
wherever a date has more tokens. The day of the first start stands in the checkpoints, and documents are written with it
for as long as the run goes on. The template that is saved with the model still writes the day of its use.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

DAY_KEY = "hf_speedkit.template_day"
"""In TrainerState.stateful_callbacks."""

# What transformers gives to templates (5.23, utils/chat_template_utils.py), called with a format that stands there.
_CALL = re.compile(r"""\bstrftime_now\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")


def writes_the_day(template: object) -> bool:
    """Whether a chat template asks for the time."""
    return isinstance(template, str) and _CALL.search(template) is not None


def on_day(template: Any, day: datetime) -> Any:
    """A chat template that writes a given time wherever it would write that of its use; any other as it is."""
    if not writes_the_day(template):
        return template
    return _CALL.sub(lambda call: json.dumps(day.strftime(call[2]), ensure_ascii=False), template)


def day_of_run(args: Any) -> datetime:
    """When the run was begun that is in `output_dir` or is to be resumed; now, where none is.

    Args:
        args: TrainingArguments; a checkpoint that only `train` is told of, and lies elsewhere, is not seen.
    """
    asked, folder = (Path(str(path)) for path in (args.resume_from_checkpoint, args.output_dir))
    found = asked if asked.is_dir() else get_last_checkpoint(folder) if folder.is_dir() else None
    try:
        saved = json.loads(Path(found or "", "trainer_state.json").read_text(encoding="utf-8"))
        return datetime.fromisoformat(saved["stateful_callbacks"][DAY_KEY])
    except (OSError, ValueError, LookupError, TypeError):  # another trainer's, or none
        return datetime.now()
