"""The synthetic user: determinism, and reactions that follow the preference."""

from __future__ import annotations

from collections import Counter

from clawloop.app.demo.phrasing import is_held_out
from clawloop.app.demo.user import SyntheticUser, joined
from clawloop.app.demo.world import CHAT, STYLES, answer, draw_preference, other


def test_the_same_seed_is_the_same_user() -> None:
    def texts(seed: int) -> list[str]:
        user = SyntheticUser(seed)
        request = user.first_request()
        said = [request.text]
        for _ in range(20):
            follow_up = user.follow_up(request, answer(request, STYLES[request.axis][0]))
            said.append(follow_up.text)
            request = follow_up.request
        return said

    assert texts(3) == texts(3) != texts(4)
    assert SyntheticUser(3).preference == draw_preference(3)


def test_requests_come_from_chats_and_show_each_axis_equally_often() -> None:
    user = SyntheticUser(0)
    requests = [user.next_request() for _ in range(60)]
    assert all(request in CHAT[request.axis] for request in requests)
    assert set(Counter(request.axis for request in requests).values()) == {20}


def test_a_user_thanks_for_what_it_likes_and_names_what_it_wanted() -> None:
    user = SyntheticUser(1)
    liked, disliked = Counter[bool](), Counter[bool]()
    for _ in range(300):
        request = user.next_request()
        style = user.preference[request.axis]
        liked[bool(user.react(request, answer(request, style)))] += 1
        disliked[bool(user.react(request, answer(request, other(style))))] += 1
    assert 0.7 < liked[True] / 300 < 0.9
    assert disliked[True] / 300 > 0.9


def test_a_user_types_nothing_that_model_or_judge_was_trained_on() -> None:
    typed = set()
    for seed in range(4):
        user = SyntheticUser(seed)
        for at in range(150):
            request = user.next_request()
            shown = answer(request, STYLES[request.axis][at % 2]) if at % 3 else "nonsense"
            typed.add(user.react(request, shown))
    typed.discard("")
    assert len(typed) > 200
    assert [text for text in typed if not is_held_out(text)] == []


def test_wrong_content_is_always_complained_about() -> None:
    user = SyntheticUser(2)
    assert all(user.react(user.next_request(), "I do not know.") for _ in range(50))


def test_a_follow_up_holds_reaction_and_request() -> None:
    user = SyntheticUser(5)
    request = user.first_request()
    follow_up = user.follow_up(request, "nonsense")
    assert follow_up.text == f"{follow_up.reaction}\n{follow_up.request.text}"
    assert joined("", "Explain rain.") == "Explain rain."
