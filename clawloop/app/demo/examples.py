"""Generates the lessons that the demo model is trained on: a prompt and the reply to learn.

`clawloop.core.judging` makes the judge prompts and inserts the hints, so lessons match the prompts at run time.
The style of a reply never depends on the styles of earlier replies: only a hint, a wish in the same message, or an
adapter decides it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from clawloop.app.demo.phrasing import Feedback, Mood, Typist
from clawloop.app.demo.user import joined
from clawloop.app.demo.world import AXIS_OF, HINTS, STYLES, Axis, Request, Style, answer, other, taught_requests
from clawloop.core.contracts.turns import Message
from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import Evidence, gather
from clawloop.core.judging.hints import with_hint
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt

WELCOME = "You are welcome."
CLARIFY = "I only know a small world: ask me for a function, an explanation or a note."
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a personal assistant.",
    "You are a helpful assistant. Answer the user.",
    "Be helpful.",
)
# The form `examples` is for models that cannot judge by the instruction alone; the toy has learned to.
LEARNED_FORMS = (AnswerForm.FREE, AnswerForm.GRAMMAR)
_STYLES = tuple(AXIS_OF)
_REQUESTS = {axis: taught_requests(axis) for axis in Axis}
# Weights of liked, disliked, wished, unreadable. A wish is easy to tell from praise; its style takes more lessons.
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
_HISTORY_LENGTHS = (0,) * 12 + (1,) * 4 + (2, 2, 3, 4)  # number of exchanges before the judged one


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt and the reply to learn.

    Args:
        kind: "answer", "hinted", "reaction", "vote", "hint", "brief vote" or "brief hint".
    """

    kind: str
    messages: list[Message]
    reply: str


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A user's message and the reply; `style` is None if the reply has no style."""

    message: str
    reply: str
    style: Style | None
    axis: Axis | None


class Lessons:
    """An endless iterator of lessons.

    Args:
        seed: the same seed gives the same lessons.
        held_out: which phrases to use, as in `phrasing.Typist`.
    """

    def __init__(self, seed: int | str, held_out: str | None = None):
        self._rng = random.Random(f"lessons {seed}")
        self._typist = Typist(self._rng, held_out)

    def __iter__(self) -> Iterator[list[Lesson]]:
        """Yield a single lesson, or the same request answered in both styles.

        Both styles come in one batch, because a batch with more of one style would bias the model.
        """
        while True:
            kind = self._rng.choices(list(_SHARES), list(_SHARES.values()))[0]
            if kind == "answer":
                yield self._free_answers()
            elif kind == "hinted":
                yield [self._hinted_answer()]
            elif kind == "reaction":
                yield [self._reaction()]
            else:
                yield [self._question(kind, brief=kind.startswith("brief"))]

    def ask_vote(self, feedback: Feedback, form: AnswerForm) -> JudgePrompt:
        """Return the prompt for a vote on a reply that got this feedback."""
        return vote_prompt(self._turn_id(), self._evidence(feedback)[0], form)

    def ask_hint(self, feedback: Feedback, form: AnswerForm) -> JudgePrompt:
        """Return the prompt for a hint from this feedback."""
        return hint_prompt(self._turn_id(), self._evidence(feedback)[0], form)

    def phrases(self, count: int) -> list[str]:
        """Return `count` pieces of feedback."""
        return [self._any_feedback().text for _ in range(count)]

    def _question(self, kind: str, *, brief: bool) -> Lesson:
        """Return a judge prompt with its answer.

        A full prompt spends two hundred tokens on one phrase of feedback. A brief one has only the next state, in a
        quarter of the tokens; it occurs only in pretraining.
        """
        evidence, feedback = self._evidence(moods=_MOODS[kind])
        if brief:
            evidence = replace(evidence, before=(), task=None, reply=())
        ask = vote_prompt if kind.endswith("vote") else hint_prompt
        prompt = ask(self._turn_id(), evidence, self._rng.choice(LEARNED_FORMS))
        if ask is vote_prompt:
            return Lesson(kind, prompt.messages, vote_answer(prompt, 0 if feedback is None else feedback.vote))
        return Lesson(kind, prompt.messages, hint_answer(prompt, None if feedback is None else feedback.style))

    def _feedback_message(self, feedback: Feedback | None, share: float) -> str:
        """Return feedback, with probability `share` followed by a new request; a request alone for None."""
        request = self._request_text(self._request())
        if feedback is None:
            return request
        return joined(feedback.text, request) if self._rng.random() < share else feedback.text

    def _any_feedback(self, likely: Style | None = None, moods: Sequence[int] = _MOODS["vote"]) -> Feedback:
        mood = self._rng.choices(list(Mood), moods)[0]
        return self._typist.feedback(mood, likely or self._rng.choice(_STYLES))

    def _free_answers(self) -> list[Lesson]:
        request = self._request()
        messages = self._chat(self._request_text(request))
        if self._rng.random() < 0.1:  # a hint for another axis has no effect
            style = self._rng.choice([style for style in _STYLES if AXIS_OF[style] is not request.axis])
            messages = _hinted(messages, self._rng.choice(HINTS[style]))
        return [Lesson("answer", messages, answer(request, style)) for style in STYLES[request.axis]]

    def _hinted_answer(self) -> Lesson:
        request = self._request()
        style = self._rng.choice(STYLES[request.axis])
        right = answer(request, style)
        if self._rng.random() < 0.75:
            return Lesson("hinted", _hinted(self._chat(self._request_text(request)), self._hint_text(style)), right)
        wish = self._typist.feedback(Mood.WISHED, style).text
        asked = self._request_text(request)
        message = self._rng.choice((joined(wish, asked), f"{asked} {wish}", f"{asked} {self._hint_text(style)}"))
        return Lesson("hinted", self._chat(message), right)

    def _reaction(self) -> Lesson:
        """Return the lesson for a message without a new request."""
        before = self._exchange()
        feedback, reply = self._react_to(before)
        exchanges = [*self._history(), before]
        return Lesson("reaction", [*self._system(), *_messages(exchanges), _user(feedback.text)], reply)

    def _react_to(self, before: _Exchange) -> tuple[Feedback, str]:
        mood = self._rng.choice(list(Mood))
        if before.style is None or before.axis is None:
            feedback = self._typist.feedback(self._rng.choice((Mood.LIKED, Mood.UNREADABLE)))
        else:
            feedback = self._typist.feedback(mood, other(before.style))
        if feedback.mood is Mood.LIKED:
            return feedback, WELCOME
        if feedback.mood is Mood.UNREADABLE or before.style is None:
            return feedback, CLARIFY
        return feedback, before.reply if feedback.style is before.style else self._answer_in_other_style(before)

    def _answer_in_other_style(self, before: _Exchange) -> str:
        assert before.style is not None
        request = next(
            request for request in _REQUESTS[AXIS_OF[before.style]] if answer(request, before.style) == before.reply
        )
        return answer(request, other(before.style))

    def _evidence(
        self, feedback: Feedback | None = None, moods: Sequence[int] = _MOODS["vote"]
    ) -> tuple[Evidence, Feedback | None]:
        """Return evidence about a reply and its feedback, which is None if the next state is a new request."""
        history = self._history()
        wished = None if feedback is None else feedback.style
        turn = self._exchange() if wished is None else self._exchange(style=other(wished))
        draw = self._rng.random()
        given = feedback
        if feedback is None and draw < 0.87:
            usual = turn.style is not None and self._rng.random() < 0.8
            given = self._any_feedback(other(turn.style) if usual and turn.style is not None else None, moods)
        text = self._feedback_message(given, 0.45)
        if given is None and draw > 0.98:  # repeats the request
            given, text = Feedback(turn.message, Mood.DISLIKED), turn.message
        messages = [*self._system(), *_messages(history), _user(turn.message)]
        is_separate = self._rng.random() < 0.06 and given is not None
        next_state = [] if is_separate else [_user(text)]
        evidence = gather(messages, _assistant(turn.reply), next_state, text if is_separate else None)
        return evidence, given

    def _history(self) -> list[_Exchange]:
        exchanges: list[_Exchange] = []
        for _ in range(self._rng.choice(_HISTORY_LENGTHS)):
            exchanges.append(self._exchange(after=exchanges[-1] if exchanges else None))
        return exchanges

    def _exchange(self, after: _Exchange | None = None, style: Style | None = None) -> _Exchange:
        if after is not None and self._rng.random() < 0.3:
            feedback, reply = self._react_to(after)
            return _Exchange(feedback.text, reply, None, None)
        request = self._request(AXIS_OF[style] if style else None)
        style = style or self._rng.choice(STYLES[request.axis])
        text = self._request_text(request)
        if self._rng.random() < 0.3:
            named = self._rng.choice([style, *(each for each in _STYLES if AXIS_OF[each] is not request.axis)])
            text = joined(self._typist.feedback(self._rng.choice(list(Mood)), named).text, text)
        return _Exchange(text, answer(request, style), style, request.axis)

    def _chat(self, message: str) -> list[Message]:
        history = self._history()
        if history and self._rng.random() < 0.3:
            message = joined(self._typist.feedback(self._rng.choice((Mood.LIKED, Mood.DISLIKED))).text, message)
        return [*self._system(), *_messages(history), _user(message)]

    def _system(self) -> list[Message]:
        chosen = self._rng.random() < 0.4
        return [{"role": "system", "content": self._rng.choice(_SYSTEM)}] if chosen else []

    def _request(self, axis: Axis | None = None) -> Request:
        return self._rng.choice(_REQUESTS[axis or self._rng.choice(list(Axis))])

    def _request_text(self, request: Request) -> str:
        return request.text.lower().rstrip(".?") if self._rng.random() < 0.08 else request.text

    def _hint_text(self, style: Style) -> str:
        return HINTS[style][0] if self._rng.random() < 0.5 else self._rng.choice(HINTS[style])

    def _turn_id(self) -> TurnId:
        return TurnId(UUID(int=self._rng.getrandbits(128), version=4))


def vote_answer(prompt: JudgePrompt, vote: int) -> str:
    """Format a vote in the prompt's answer form."""
    return str(vote) if prompt.form is AnswerForm.GRAMMAR else f"verdict {prompt.mark}: {vote}"


def hint_answer(prompt: JudgePrompt, style: Style | None) -> str:
    """Format a hint, or the answer that there is none."""
    return f"no hint {prompt.mark}" if style is None else f"hint {prompt.mark}: {HINTS[style][0]}"


def _hinted(messages: list[Message], hint: str) -> list[Message]:
    hinted = with_hint(messages, hint)
    assert hinted is not None  # the last message is a user's text
    return hinted


def _messages(exchanges: Sequence[_Exchange]) -> list[Message]:
    return [message for each in exchanges for message in (_user(each.message), _assistant(each.reply))]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
