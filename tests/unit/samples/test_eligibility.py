import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import TurnStatus
from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.samples.decision import unseen_parts, why_not_trainable

PLAIN: dict[str, JsonValue] = {"temperature": 0.6, "top_p": 1.0, "top_k": -1}
STRICT_TOOL: JsonValue = {"type": "function", "function": {"name": "f", "strict": True}}
TOOL: JsonValue = {"type": "function", "function": {"name": "f", "strict": False}}


def why(
    changes: dict[str, JsonValue] | None = None,
    *,
    without: str = "",
    status: TurnStatus = TurnStatus.COMPLETE,
    tools: list[JsonValue] | None = None,
    prompt_ids: list[int] | None = None,
    unknown: str = "",
    logprobs: tuple[float, ...] = (-0.1, -0.2),
) -> str | None:
    sampling = {name: value for name, value in (PLAIN | (changes or {})).items() if name != without}
    return why_not_trainable(
        status=status,
        sampling=sampling,
        tools=tools,
        prompt_ids=None if unknown == "prompt_ids" else prompt_ids or [1, 2, 3],
        response_ids=None if unknown == "response_ids" else [4, 5],
        logprobs=None if unknown == "logprobs" else logprobs,
        unseen=(),
    )


def test_a_turn_sampled_at_a_temperature_alone_can_be_trained() -> None:
    assert why() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1},
        {"temperature": 2.0},
        {"top_k": 0},
        {"min_p": 0.0},
        {"min_p": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "allowed_token_ids": None},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"use_beam_search": False, "watermarking": None},
        {
            "seed": 1,
            "stop": ["END"],
            "max_tokens": 5,
            "n": 4,
            "user": "u",
            "logprobs": True,
            "top_logprobs": 5,
        },
    ],
)
def test_neutral_values_and_unrelated_settings_leave_a_turn_trainable(
    changes: dict[str, JsonValue],
) -> None:
    assert why(changes) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0}, "temperature 0"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": None}, "temperature unknown"),
        ({"temperature": "0.6"}, "temperature unknown"),
        ({"top_p": 0.95}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": None}, "top_p unknown"),
        ({"top_k": 20}, "top_k"),
        ({"top_k": True}, "top_k unknown"),
        ({"min_p": 0.05}, "min_p"),
        ({"min_p": "x"}, "min_p"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided decoding"),
        ({"guided_regex": "a+", "guided_choice": ["a"]}, "guided decoding"),
        ({"guided_my secret": True}, "guided decoding"),  # a client's own word has no place in a reason
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"thinking_token_budget": 100}, "thinking_token_budget"),
        ({"watermarking": True}, "watermarking"),
    ],
)
def test_settings_that_change_the_distribution_are_named(changes: dict[str, JsonValue], reason: str) -> None:
    assert why(changes) == f"not trainable: {reason}"


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k"])
def test_a_field_the_gateway_always_fills_in_is_unknown_when_missing(field: str) -> None:
    assert why(without=field) == f"not trainable: {field} unknown"


def test_every_reason_is_named() -> None:
    assert why({"top_p": 0.9, "top_k": 20, "min_p": 0.1}) == "not trainable: top_p, top_k, min_p"


def test_a_strict_tool_constrains_the_reply_unless_no_tool_may_be_called() -> None:
    assert why(tools=[TOOL]) is None
    assert why(tools=[TOOL, STRICT_TOOL]) == "not trainable: strict tool"
    assert why({"tool_choice": "auto"}, tools=[STRICT_TOOL]) == "not trainable: strict tool"
    assert why({"tool_choice": "none"}, tools=[STRICT_TOOL]) is None


def test_one_call_at_most_constrains_the_reply_of_a_request_with_tools() -> None:
    """vLLM then writes the calls by a grammar."""
    assert why({"parallel_tool_calls": False}, tools=[TOOL]) == "not trainable: parallel_tool_calls"
    assert why({"parallel_tool_calls": False, "tool_choice": "auto"}, tools=[TOOL]) is not None
    for neutral in (True, None):
        assert why({"parallel_tool_calls": neutral}, tools=[TOOL]) is None
    assert why({"parallel_tool_calls": False, "tool_choice": "none"}, tools=[TOOL]) is None
    assert why({"parallel_tool_calls": False}) is None
    assert why(tools=["nonsense", {"function": 3}]) is None


def test_a_reply_cut_by_length_is_trained_as_cut_but_a_broken_one_is_not() -> None:
    assert why(status=TurnStatus.LENGTH) is None
    assert why(status=TurnStatus.ABORTED) == "not trainable: reply aborted"
    assert why(status=TurnStatus.ERROR) == "not trainable: reply error"


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [
        ("prompt_ids", "prompt ids unknown"),
        ("response_ids", "response ids unknown"),
        ("logprobs", "log-probs unknown"),
    ],
)
def test_values_the_engine_did_not_report_are_not_invented(unknown: str, reason: str) -> None:
    assert why(unknown=unknown) == f"not trainable: {reason}"


def test_an_empty_reply_cannot_be_trained() -> None:
    reason = why_not_trainable(
        status=TurnStatus.COMPLETE, sampling=PLAIN, tools=None, prompt_ids=[1], response_ids=[], logprobs=[], unseen=()
    )
    assert reason == "not trainable: empty reply"


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -9999.0])
def test_log_probs_that_are_no_numbers_are_not_trained(bad: float) -> None:
    assert why(logprobs=(-0.1, bad)) == "not trainable: log-probs not finite"


def test_log_probs_of_another_length_raise() -> None:
    with pytest.raises(EngineAnswerUnusable, match="3 log-probs for 2 response ids"):
        why(logprobs=(-0.1, -0.2, -0.3))


@given(
    st.dictionaries(
        st.sampled_from(["top_p", "min_p", "tool_choice", "temperature", "logit_bias"]),
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    )
)
def test_values_of_any_shape_are_judged(changes: dict[str, JsonValue]) -> None:
    reason = why(changes)
    assert reason is None or reason.startswith("not trainable: ")


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image"),
        ({"type": "input_image", "image_url": "x"}, "image"),
        ({"image_url": {"url": "x"}}, "image"),
        ({"type": "image_embeds", "image_embeds": "x"}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "video_url", "video_url": {}}, "video"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "secret words"}, "other content"),
        ({"type": {}}, "other content"),
    ],
)
def test_a_prompt_with_what_the_trainer_cannot_see_is_not_trained(part: JsonValue, kind: str) -> None:
    text: JsonValue = {"type": "text", "text": "What is this?"}
    messages: list[dict[str, JsonValue]] = [
        {"role": "user", "content": [text, part, part]},
        {"role": "user", "content": "image_url"},
        {"role": "tool", "content": [part]},
    ]
    assert unseen_parts(messages) == [kind]
    reason = why_not_trainable(
        status=TurnStatus.COMPLETE,
        sampling=PLAIN,
        tools=None,
        prompt_ids=[1],
        response_ids=[2],
        logprobs=[-0.1],
        unseen=unseen_parts(messages),
    )
    assert reason == f"not trainable: {kind} in the prompt"


@pytest.mark.parametrize(
    "content",
    [
        "image",
        None,
        [],
        ["image"],
        [{"type": "text", "text": "image_url"}],
        [{"type": "thinking", "thinking": "image"}],
    ],
)
def test_a_prompt_of_text_is_trained(content: JsonValue) -> None:
    assert unseen_parts([{"role": "user", "content": content}, {"role": "assistant"}]) == []
