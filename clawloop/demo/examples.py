"""Lessons the demo model is made from: what stands in a prompt, and the reply to learn.

Knows nothing about tokens. Judge prompts are made by `clawloop.judging` itself, and hints are put where
`clawloop.judging.hints` puts them, so the model is taught exactly what it will be asked. A reply's style never
depends on the styles of earlier replies: only a hint, a wish in the same message, or an adapter decides it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from clawloop.contracts.turns import Message
from clawloop.demo.hints import HINTS
from clawloop.demo.phrasing import Feedback, Mood, Typist
from clawloop.demo.user import joined
from clawloop.demo.world import AXIS_OF, STYLES, Axis, Request, Style, answer, every_request, other
from clawloop.ids import TurnId
from clawloop.judging.evidence import Evidence, gather
from clawloop.judging.hints import with_hint
from clawloop.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt

WELCOME = "You are welcome."
LOST = "I only know a small world: ask me for a function, an explanation or a note."
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a personal assistant.",
    "You are a helpful assistant. Answer the user.",
    "Be helpful.",
)
_STYLES = tuple(AXIS_OF)
_REQUESTS = {axis: every_request(axis) for axis in Axis}
# Of 100: liked, disliked, wished, unreadable. A wish is easily seen not to be praise; which it is takes more lessons.
_JUDGED = ("vote", "hint", "brief vote", "brief hint")
_MOODS = {kind: (33, 30, 15, 22) if kind.endswith("vote") else (18, 18, 44, 20) for kind in _JUDGED}
_SHARES = {
    "answer": 0.10,  # two lessons each
    "hinted": 0.10,
    "reaction": 0.02,
    "vote": 0.09,
    "hint": 0.09,
    "brief vote": 0.33,
    "brief hint": 0.27,
}
_EARLIER = (0,) * 12 + (1,) * 4 + (2, 2, 3, 4)  # exchanges before the one in question


@dataclass(frozen=True, slots=True)
class Lesson:
    """A chat and the reply to learn.

    Args:
        kind: "answer", "hinted", "reaction", "vote", "hint", "brief vote" or "brief hint".
    """

    kind: str
    messages: list[Message]
    reply: str


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A user's message and what was replied; `style` None if the reply is in none."""

    said: str
    reply: str
    style: Style | None
    axis: Axis | None


class Lessons:
    """An endless source of lessons.

    Args:
        seed: the same seed gives the same lessons.
        held_out: which phrases to use; see `phrasing.Typist`.
    """

    def __init__(self, seed: int | str, held_out: str | None = None):
        self._chance = random.Random(f"lessons {seed}")
        self._typist = Typist(self._chance, held_out)

    def __iter__(self) -> Iterator[list[Lesson]]:
        """Lessons that belong together: one, or the same request answered in both styles.

        Both at once, because a batch with more of one style would pull the model that way.
        """
        while True:
            kind = self._chance.choices(list(_SHARES), list(_SHARES.values()))[0]
            if kind == "answer":
                yield self._free_answers()
            elif kind == "hinted":
                yield [self._wished_answer()]
            elif kind == "reaction":
                yield [self._reaction()]
            else:
                yield [self._question(kind, brief=kind.startswith("brief"))]

    def ask_vote(self, feedback: Feedback, form: AnswerForm) -> JudgePrompt:
        """A question for a vote on a reply after which this was said."""
        return vote_prompt(self._turn_id(), self._judged(feedback)[0], form)

    def ask_hint(self, feedback: Feedback, form: AnswerForm) -> JudgePrompt:
        """A question for a hint, likewise."""
        return hint_prompt(self._turn_id(), self._judged(feedback)[0], form)

    def phrases(self, count: int) -> list[str]:
        """Feedback alone, as much of it as asked for."""
        return [self._any_feedback().text for _ in range(count)]

    def _question(self, kind: str, *, brief: bool) -> Lesson:
        """A question to the judge.

        In full it says something about one phrase in two hundred tokens. A brief one shows nothing but what came next,
        in a quarter of that; nobody asks so outside of pretraining.
        """
        evidence, said = self._judged(moods=_MOODS[kind])
        if brief:
            evidence = replace(evidence, before=(), task=None, reply=())
        ask = vote_prompt if kind.endswith("vote") else hint_prompt
        prompt = ask(self._turn_id(), evidence, self._chance.choice(list(AnswerForm)))
        if ask is vote_prompt:
            return Lesson(kind, prompt.messages, vote_answer(prompt, 0 if said is None else said.vote))
        return Lesson(kind, prompt.messages, hint_answer(prompt, None if said is None else said.style))

    def _followed(self, said: Feedback | None, share: float) -> str:
        """Feedback as a message, with a new request after it in a share of them; None is a request alone."""
        request = self._typed(self._request())
        if said is None:
            return request
        return joined(said.text, request) if self._chance.random() < share else said.text

    def _any_feedback(self, likely: Style | None = None, moods: Sequence[int] = _MOODS["vote"]) -> Feedback:
        mood = self._chance.choices(list(Mood), moods)[0]
        return self._typist.feedback(mood, likely or self._chance.choice(_STYLES))

    def _free_answers(self) -> list[Lesson]:
        request = self._request()
        messages = self._chat(self._typed(request))
        if self._chance.random() < 0.1:  # a hint about something else decides nothing
            style = self._chance.choice([style for style in _STYLES if AXIS_OF[style] is not request.axis])
            messages = _hinted(messages, self._chance.choice(HINTS[style]))
        return [Lesson("answer", messages, answer(request, style)) for style in STYLES[request.axis]]

    def _wished_answer(self) -> Lesson:
        request = self._request()
        style = self._chance.choice(STYLES[request.axis])
        right = answer(request, style)
        if self._chance.random() < 0.75:
            return Lesson("hinted", _hinted(self._chat(self._typed(request)), self._hint_text(style)), right)
        wish = self._typist.feedback(Mood.WISHED, style).text
        asked = self._typed(request)
        said = self._chance.choice((joined(wish, asked), f"{asked} {wish}", f"{asked} {self._hint_text(style)}"))
        return Lesson("hinted", self._chat(said), right)

    def _reaction(self) -> Lesson:
        """The reply to a message that asks for nothing new."""
        before = self._exchange()
        said, reply = self._reacted(before)
        exchanges = [*self._history(), before]
        return Lesson("reaction", [*self._system(), *_messages(exchanges), _user(said.text)], reply)

    def _reacted(self, before: _Exchange) -> tuple[Feedback, str]:
        mood = self._chance.choice(list(Mood))
        if before.style is None or before.axis is None:
            said = self._typist.feedback(self._chance.choice((Mood.LIKED, Mood.UNREADABLE)))
        else:
            said = self._typist.feedback(mood, other(before.style))
        if said.mood is Mood.LIKED:
            return said, WELCOME
        if said.mood is Mood.UNREADABLE or before.style is None:
            return said, LOST
        return said, before.reply if said.style is before.style else self._redone(before)

    def _redone(self, before: _Exchange) -> str:
        assert before.style is not None
        request = next(
            request for request in _REQUESTS[AXIS_OF[before.style]] if answer(request, before.style) == before.reply
        )
        return answer(request, other(before.style))

    def _judged(
        self, feedback: Feedback | None = None, moods: Sequence[int] = _MOODS["vote"]
    ) -> tuple[Evidence, Feedback | None]:
        """Evidence about one reply, and the feedback in it; None if what came next is a new request."""
        history = self._history()
        wished = None if feedback is None else feedback.style
        turn = self._exchange() if wished is None else self._exchange(style=other(wished))
        draw = self._chance.random()
        said = feedback
        if feedback is None and draw < 0.87:
            usual = turn.style is not None and self._chance.random() < 0.8
            said = self._any_feedback(other(turn.style) if usual and turn.style is not None else None, moods)
        text = self._followed(said, 0.45)
        if said is None and draw > 0.98:  # asks the same again
            said, text = Feedback(turn.said, Mood.DISLIKED), turn.said
        messages = [*self._system(), *_messages(history), _user(turn.said)]
        outside = self._chance.random() < 0.06 and said is not None
        next_state = [] if outside else [_user(text)]
        evidence = gather(messages, _assistant(turn.reply), next_state, text if outside else None)
        return evidence, said

    def _history(self) -> list[_Exchange]:
        exchanges: list[_Exchange] = []
        for _ in range(self._chance.choice(_EARLIER)):
            exchanges.append(self._exchange(after=exchanges[-1] if exchanges else None))
        return exchanges

    def _exchange(self, after: _Exchange | None = None, style: Style | None = None) -> _Exchange:
        if after is not None and self._chance.random() < 0.3:
            said, reply = self._reacted(after)
            return _Exchange(said.text, reply, None, None)
        request = self._request(AXIS_OF[style] if style else None)
        style = style or self._chance.choice(STYLES[request.axis])
        text = self._typed(request)
        if self._chance.random() < 0.3:
            named = self._chance.choice([style, *(each for each in _STYLES if AXIS_OF[each] is not request.axis)])
            text = joined(self._typist.feedback(self._chance.choice(list(Mood)), named).text, text)
        return _Exchange(text, answer(request, style), style, request.axis)

    def _chat(self, said: str) -> list[Message]:
        history = self._history()
        if history and self._chance.random() < 0.3:
            said = joined(self._typist.feedback(self._chance.choice((Mood.LIKED, Mood.DISLIKED))).text, said)
        return [*self._system(), *_messages(history), _user(said)]

    def _system(self) -> list[Message]:
        chosen = self._chance.random() < 0.4
        return [{"role": "system", "content": self._chance.choice(_SYSTEM)}] if chosen else []

    def _request(self, axis: Axis | None = None) -> Request:
        return self._chance.choice(_REQUESTS[axis or self._chance.choice(list(Axis))])

    def _typed(self, request: Request) -> str:
        return request.text.lower().rstrip(".?") if self._chance.random() < 0.08 else request.text

    def _hint_text(self, style: Style) -> str:
        return HINTS[style][0] if self._chance.random() < 0.5 else self._chance.choice(HINTS[style])

    def _turn_id(self) -> TurnId:
        return TurnId(UUID(int=self._chance.getrandbits(128), version=4))


def vote_answer(prompt: JudgePrompt, vote: int) -> str:
    """A vote in the form its prompt asks for."""
    return str(vote) if prompt.form is AnswerForm.GRAMMAR else f"verdict {prompt.mark}: {vote}"


def hint_answer(prompt: JudgePrompt, style: Style | None) -> str:
    """A hint, or that there is none, in the form every hint prompt asks for."""
    return f"no hint {prompt.mark}" if style is None else f"hint {prompt.mark}: {HINTS[style][0]}"


def _hinted(messages: list[Message], hint: str) -> list[Message]:
    hinted = with_hint(messages, hint)
    assert hinted is not None  # the last message is a user's text
    return hinted


def _messages(exchanges: Sequence[_Exchange]) -> list[Message]:
    return [message for each in exchanges for message in (_user(each.said), _assistant(each.reply))]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
