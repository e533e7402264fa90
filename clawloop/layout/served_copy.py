"""The quantised copy of a trained model that engines serve: that it is a copy.

An engine with another tokenizer or template would answer, and every sample would be trained as something it was not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from clawloop.errors import SetupError
from clawloop.families.chat_format import ChatOptions
from clawloop.families.template import read_template
from clawloop.layout.model_folder import read_model_shape
from clawloop.layout.model_shape import ModelShape

_OPTION = "--serve-model"
_REMEDY = "give a quantised copy of the model in --model"
_SIZES = {
    "architecture": "architecture",
    "vocab": "token ids",
    "layers": "layers",
    "width": "features",
    "heads": "heads",
    "kv_heads": "heads of keys",
    "lora": "adapted projections",
}


def read_served_copy(folder: Path, model: Path, shape: ModelShape, chat: ChatOptions | None = None) -> ModelShape:
    """Shape of the served model: that of the trained model, with the stored bytes of its quantised copy.

    Args:
        folder: the copy's.
        model, shape: of the trained model.
        chat: what an operator sets for both.

    Raises:
        SetupError: a folder is no complete model, or the copy is not quantised, or not of this model.
    """
    copy = read_model_shape(folder, chat)
    if copy.quantised is None:
        raise SetupError(f"{_OPTION}: {folder} is not quantised: {_REMEDY}, or leave it out")
    for difference in _differences(folder, copy, model, shape, chat):
        raise SetupError(f"{_OPTION}: {folder} is no copy of {shape.name}: {difference}: {_REMEDY}")
    return replace(shape, stored_bytes=copy.stored_bytes, quantised=copy.quantised)


def require_trainable_weights(shape: ModelShape) -> None:
    """
    Raises:
        SetupError: they are quantised.
    """
    if shape.quantised is not None:
        raise SetupError(
            f"--model: {shape.name} has weights quantised by {shape.quantised}, which are served and not trained: give "
            f"the unquantised model to --model and this one to {_OPTION}; or serve and record it only: --no-train"
        )


def _differences(
    folder: Path, copy: ModelShape, model: Path, shape: ModelShape, chat: ChatOptions | None
) -> Iterator[str]:
    for name, word in _SIZES.items():
        theirs, ours = getattr(copy, name), getattr(shape, name)
        if theirs != ours:
            yield f"it has other {word}" if name == "lora" else f"{word} {theirs}, not {ours}"
    if _token_ids(folder) != _token_ids(model):
        yield "its tokenizer.json gives tokens other ids"
    if (chat is None or chat.template is None) and read_template(folder).strip() != read_template(model).strip():
        yield "its chat template is another (--chat-template FILE sets one for both)"


def _token_ids(folder: Path) -> object:
    """Ids of all tokens; None if the folder has no `tokenizer.json`.

    Raises:
        SetupError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return content.get("model", {}).get("vocab"), added
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"{path} cannot be read: {error}: download the model again, completely") from error
