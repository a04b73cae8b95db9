"""What transformers' modeling files say, as text: importing one binds kernel packages, and those can end a process.

Checked against transformers 5.23.0; tests/kernels/test_modeling_files.py holds it against the live classes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Any

from hf_speedkit.kernels.requirements import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """Which attention a model class can take.

    Args:
        model_class: name of transformers' causal language model.
        flash: it can do without a mask (`_supports_flash_attn`).
        sdpa: it can run torch's scaled_dot_product_attention (`_supports_sdpa`); otherwise eager is what it gets.
        settable: its file takes the attention from AttentionInterface, so another can be put there.
    """

    model_class: str
    flash: bool
    sdpa: bool
    settable: bool


def abilities_of(config: Any) -> Abilities | None:
    """What the causal language model of a config can do; None where transformers has none.

    Args:
        config: of transformers; of a multimodal one the text part is looked at first.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    text = config.get_text_config()
    for part, names in (
        (text, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        (config, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        named = names.get(part.model_type)
        model_class = named if isinstance(named, str) else next(iter(named or ()), None)
        # Some types have no model of their own (internlm3 is a Llama): then the folder is that of the type that has.
        owners = [family_of(part), *(kind for kind, other in names.items() if other == model_class)]
        for family in owners if model_class is not None else ():
            found = _in_folder(family, str(model_class))
            if found is not None:
                return found
    return None


def _in_folder(family: str | None, model_class: str) -> Abilities | None:
    for file in modeling_files(family):
        classes = classes_in(file)
        if model_class in classes:
            return Abilities(
                model_class=model_class,
                flash=_flag(classes, model_class, "_supports_flash_attn"),
                sdpa=_flag(classes, model_class, "_supports_sdpa"),
                settable="ALL_ATTENTION_FUNCTIONS" in file.read_text(encoding="utf-8"),
            )
    return None


def modeling_files(family: str | None) -> tuple[Path, ...]:
    """The modeling files of one folder of the installed transformers; none for a family that it does not hold."""
    spec = util.find_spec("transformers")
    if family is None or spec is None or spec.origin is None:
        return ()
    return tuple(sorted((Path(spec.origin).parent / "models" / family).glob("modeling_*.py")))


@lru_cache(maxsize=8)
def classes_in(file: Path) -> Mapping[str, ast.ClassDef]:
    """The classes of a file, by name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _flag(classes: Mapping[str, ast.ClassDef], name: str, flag: str) -> bool:
    """A class attribute that is True or False, inherited inside the file; False, PreTrainedModel's own, elsewhere."""
    todo = [name]
    while todo:
        node = classes.get(todo.pop(0))
        if node is None:
            continue
        for target, value in _assignments(node):
            if target == flag and isinstance(value, ast.Constant):
                return bool(value.value)
        todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return False


def _assignments(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            yield from ((target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
