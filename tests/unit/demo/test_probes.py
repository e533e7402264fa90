"""The demo's probes ask what nobody else does, and take the right content in either style."""

from __future__ import annotations

from clawloop.app.demo.world import CHAT, EVALUATION, PROBES, STYLES, Axis, answer, demo_probes
from clawloop.core.gate.checks import is_right
from clawloop.operations.probes import MOST_PROBES


def test_no_user_types_them_and_no_evaluation_asks_them() -> None:
    typed = {request.text for axis in Axis for request in CHAT[axis]} | {request.text for request in EVALUATION}
    asked = {probe.messages[0]["content"] for probe in demo_probes()}
    assert not asked & typed
    assert len(asked) == len(PROBES) == 120 <= MOST_PROBES


def test_the_right_content_in_either_style_is_right_and_nothing_else() -> None:
    for request, probe in zip(PROBES, demo_probes(), strict=True):
        first, second = (answer(request, style) for style in STYLES[request.axis])
        assert is_right(probe, first)
        assert is_right(probe, f"\n{second} ")
        assert not is_right(probe, first[:-4])
        assert not is_right(probe, first + second)
    texts = {answer(request, style) for request in PROBES for style in STYLES[request.axis]}
    assert all(sum(bool(is_right(probe, text)) for text in texts) == 2 for probe in demo_probes()[:3])
