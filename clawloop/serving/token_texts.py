"""The text of each token, from an engine: what a plain completion says of its prompt.

`/detokenize` joins the texts, and no route of vLLM takes them one by one. A token that is part of a character has the
replacement character as its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawloop.errors import EngineAnswerUnusable

PATH = "/v1/completions"


def texts_request(ids: Sequence[int]) -> dict[str, Any]:
    """The body that asks for the texts of these ids, without the model; there must be one at least."""
    # vLLM says nothing of a prompt's first token, so that is there twice.
    return {"prompt": [ids[0], *ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "stream": False}


def texts_of(answer: object, ids: Sequence[int]) -> list[str]:
    """The texts in an engine's answer to `texts_request`.

    Raises:
        EngineAnswerUnusable: it has not the text of each token.
    """
    try:
        places = answer["choices"][0]["prompt_logprobs"][1:]  # type: ignore[index]
        texts = [place[str(token)]["decoded_token"] for place, token in zip(places, ids, strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise EngineAnswerUnusable(f"it has not the text of each token ({type(error).__name__})") from error
    if not all(isinstance(text, str) for text in texts):
        raise EngineAnswerUnusable("the text of a token is no text")
    return texts
