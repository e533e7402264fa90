"""Times, figures and states as the page writes them, and the glossary of the words for versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from clawloop.core.contracts.training import SampleState, TrainingView
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.turns.explain import FOUND_BY, MEANINGS, learned_from

# Wording --------------------------------------------------------------------------------------------------------------
# The page's wording of times, figures and states.

_UNITS = ((86400 * 7, "week"), (86400, "day"), (3600, "hour"), (60, "minute"))
_VERDICTS = {1: "praised", 0: "neutral", -1: "blamed"}
OUTCOMES = {
    TurnOutcome.WAITING: "waiting",
    TurnOutcome.SIDE: "side turn",
    TurnOutcome.NO_FEEDBACK: "nothing followed",
    TurnOutcome.NOT_TRAINABLE: "cannot be trained",
    TurnOutcome.UNJUDGED: "no valid vote",
    TurnOutcome.UNDECIDED: "undecided",
    TurnOutcome.SAMPLED: "waits for a step",
    TurnOutcome.HELD_OUT: "held out",
    TurnOutcome.TRAINED: "trained",
    TurnOutcome.EXPIRED: "expired",
    TurnOutcome.QUARANTINED: "quarantined",
    TurnOutcome.ROLLED_BACK: "rolled back",
    TurnOutcome.ERASED: "erased",
}


# What happened to a policy and its details, where the ledger's own words say little; see `event_words`.
_EVENTS = {
    "paused": "training paused",
    "resumed": "training resumed",
    "version_released": "rejected version accepted by a person",
    "canary_ended": "trial of a version ended",
    "quarantined": "replies left out of training",
    "step_abandoned": "step given up",
    "step_expired": "step whose replies were too old",
    "recipe_set": "recipe changed",
    "created": "policy made",
    "retired": "policy ended",
    "erased": "content erased",
    "curriculum_moved": "tasks changed",
    "lesson_active": "a lesson became active",
    "lesson_learned": "a lesson became learned",
    "lesson_off": "a lesson was turned off",
    "lesson_superseded": "another lesson took a lesson's place",
    "lesson_erased": "a lesson was forgotten",
}
_DETAILS = {
    "reason": "because",
    "why": "because",
    "to": "to version",
    "head": "trained until then: version",
    "active": "answered until then: version",
    "was": "before",
    "like": "as policy",
    "size": "episodes in a group",
}


def age(at: datetime | None) -> str:
    """The age of a moment, e.g. `3 minutes ago`."""
    if at is None:
        return "never"
    seconds = (datetime.now(UTC) - at).total_seconds()
    for size, name in _UNITS:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now" if seconds < 5 else f"{int(seconds)} seconds ago"


def duration(seconds: float) -> str:
    """E.g. `1 min 20 s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def verdict(value: int | None) -> str:
    return "no verdict" if value is None else _VERDICTS.get(value, str(value))


def tone(value: int | None) -> str:
    """A class of the style sheet."""
    return {1: "good", -1: "bad", 0: "neutral"}.get(value, "none") if value is not None else "none"


def figure(value: Any) -> str:
    """A number with three digits that count, or a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def outcome(value: TurnOutcome) -> str:
    return OUTCOMES[value]


def outcome_meaning(value: TurnOutcome) -> str:
    return MEANINGS.get(value, "waits for a reaction, or for its judge")


def why(value: str, shown: TurnOutcome) -> str:
    """The reason for a turn's outcome, without the words of the outcome, which stand beside it."""
    return value.removeprefix(OUTCOMES[shown]).removeprefix(": ")


def code(words: str) -> Markup:
    """A text with what stands between its backticks as code; of odd backticks nothing is."""
    parts = words.split("`")
    if len(parts) % 2 == 0:
        return escape(words)
    return Markup("").join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))


def sample(value: SampleState) -> str:
    return "waits for a step" if value is SampleState.FRESH else value.value.replace("_", " ")


def standing(training: TrainingView) -> str:
    """The reason of a policy's training state, with the page's word for samples."""
    count = f"{min(training.ready, training.needed)} of {training.needed}"
    return training.reason.replace(f"{count} samples for the next step", f"{count} replies for the next step")


def event_words(kind: str) -> str:
    return _EVENTS.get(kind, kind.replace("_", " "))


def detail_words(name: str) -> str:
    return _DETAILS.get(name, name.replace("_", " "))


def share(value: float) -> str:
    return f"{value:.0%}"


def sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def plural(count: int, noun: str, several: str = "") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {several or noun + 's'}"


def gloss(term: str) -> Markup:
    """The attribute `title` with the meaning of a term."""
    return Markup(' title="{}"').format(term_meaning(term))


def term_meaning(term: str) -> str:
    """The meaning of a term of TERMS, or of a figure by its name."""
    return TERMS.get(term) or FIGURES[term]


FILTERS: dict[str, Callable[..., Any]] = {
    "age": age,
    "duration": duration,
    "moment": moment,
    "verdict": verdict,
    "tone": tone,
    "found_by": FOUND_BY.__getitem__,
    "figure": figure,
    "outcome": outcome,
    "outcome_meaning": outcome_meaning,
    "learned_from": learned_from,
    "standing": standing,
    "gloss": gloss,
    "term": term_meaning,
    "sample": sample,
    "event_words": event_words,
    "detail_words": detail_words,
    "share": share,
    "plural": plural,
    "sentence": sentence,
    "why": why,
    "code": code,
}


# Glossary -------------------------------------------------------------------------------------------------------------
# Meanings of the words and figures of versions, for people who read them for the first time.

STATES = {
    "active": "answers chats now",
    "pinned": "a person chose that it answers, whatever is trained",
    "canary": "tried by a share of the conversations, until verdicts decide",
    "head": "training goes on from it",
    "on the path": "what it learned is in the head, which was trained from it",
    "rolled back": "training went on from an earlier version, without it",
    "candidate": "just made; the gate has not decided yet",
    "rejected": "the gate did not accept it; a person may release it",
    "abandoned": "its step was given up before it was accepted",
    "files removed": "its files were deleted, so it cannot answer any more",
}
_NATS = "in nats (0: nothing changed)"
FIGURES = {
    # of a step, and of the check of its numbers
    "loss": "what the step makes smaller; it says little by itself",
    "grad_norm": "size of the gradient before clipping; huge if something broke",
    "parent_distance": f"how far a token's log-probability moved from the parent, on average, {_NATS}",
    "parent_median": f"the same for the token in the middle: half of them moved less, {_NATS}",
    "token_share": "share of the tokens that moved very far from the parent (`gate.token_share` is the limit)",
    "base_distance": f"how far it is from the base model, on average, {_NATS}",
    "base_median": f"the same for the token in the middle, {_NATS}",
    "ratio": "how likely the trainer finds the replies, relative to the engine that wrote them; 1: as likely",
    "kl": f"distance to the base model before the step, {_NATS}",
    "tokens": "tokens of replies that were trained",
    "samples": "judged replies that were trained",
    "dropped": "samples that were left out",
    "without_hint": "samples of which only the verdict was trained",
    "seconds": "how long it took",
    "moves_seconds": "time for scoring the replies again, to see how much the step moved each token",
    # of the replay of replies that are never trained
    "praised": "held-out replies with a good verdict",
    "blamed": "held-out replies with a bad verdict",
    "change": "by how much it is better than its parent; below 0 it is worse",
    "upper_bound": "the change is at most this, with 95 % confidence; below -0.01 the version is rejected",
    # of the probes
    "asked": "probes that were asked",
    "checked": "probes whose answer is known",
    "right": "share of those that it answered rightly",
    "parent_right": "share of those that its parent answered rightly",
    "base_right": "share of those that the base model answered rightly",
    "general": "general questions that the base model knows",
    "general_right": "share of those that it answered rightly",
    "compared": "probes on which a judge compared it with its parent",
    "preferred": "probes on which the judge preferred it",
    "parent_preferred": "probes on which the judge preferred its parent",
    "median_words": "words of an answer whose content is known, at the median",
    "parent_median_words": "words of its parent's, at the median",
    "base_median_words": "words of the base model's, at the median",
    "broken": "share of the answers that are empty or loop",
    "parent_broken": "share of its parent's answers that are empty or loop",
    "words": "words of an answer, on average",
    "parent_words": "words of its parent's answer, on average",
    "cut": "share of the answers that a token limit cut",
    "parent_cut": "share of its parent's answers that a token limit cut",
    "repeated": "share of an answer that repeats itself, on average",
    "parent_repeated": "share of its parent's answer that repeats itself, on average",
    "valid_calls": "share of the tool calls that are valid",
    "parent_valid_calls": "share of its parent's tool calls that are valid",
    # of the canary
    "sessions": "judged sessions that it answered",
    "other_sessions": "judged sessions that the previous version answered",
    "hours": "how long it was tried",
    "radius": "how uncertain the change still is: it may be this much more or less",
}
# Words of tables and facts; see `gloss`.
TERMS = {
    "advantage": "how much likelier (above 0) or less likely (below 0) the step should make the token",
    "episode advantage": "its reward compared with the other episodes of its group; above 0 it becomes likelier",
    "canary": STATES["canary"],
    "curriculum": "which kinds and levels of tasks are practised, chosen by how often they succeed",
    "weight": "how often tasks of this kind are drawn, compared with the others",
    "success": "share of the newest episodes of this kind that succeeded",
    "counted": "episodes since the last change of level or weight",
    "open": "some of its episodes still run, or wait for their reward",
    "settled": "its episodes have rewards and were compared",
    "dropped": "too few of its episodes got a reward to be compared",
    "gate": "checks of a version before it answers: ✓ passed, ✕ failed, – not decided",
    "kappa": "agreement beyond chance: 0 is chance, 1 is full agreement",
    "log-prob": "natural logarithm of the token's probability when it was written; 0: certain",
    "vote log-prob": "natural logarithm of the vote's probability; adding 0.69 doubles its weight",
    "moved": "by how much the step changed the token's log-prob",
    "main turn": "a reply in a conversation: it is judged and can be trained",
    "side turn": "a title or another chore of the program: it is recorded, not judged and not trained",
    "good / bad": "verdicts on its replies",
    "length": "tokens of its replies, on average",
    "distance": FIGURES["base_distance"],
    "evaluation": "share of an evaluation's requests answered as wanted",
    "temporal": "Temporal schedules the work. Its own page lists the training of this policy by this name.",
}
_MAIN = {
    *("samples", "tokens", "seconds", "parent_distance", "base_distance", "praised", "blamed", "change", "sessions"),
    *("right", "parent_right", "words", "parent_words", "broken"),
}
_SHARES = {
    *("token_share", "right", "parent_right", "base_right", "general_right", "broken", "parent_broken", "cut"),
    *("parent_cut", "repeated", "parent_repeated", "valid_calls", "parent_valid_calls"),
}
_UNIT_OF = {
    **dict.fromkeys(("parent_distance", "parent_median", "base_distance", "base_median", "upper_bound", "kl"), "nats"),
    **dict.fromkeys(("seconds", "moves_seconds"), "s"),
    "hours": "h",
}


def words_of(states: Iterable[str]) -> dict[str, str]:
    """The words that occur in these states of versions, with what they mean."""
    found = {word for state in states for word in _words(state)}
    return {word: meaning for word, meaning in STATES.items() if word in found}


def meaning_of(state: str) -> str:
    """Meaning of a version's state, in one line."""
    return "; ".join(f"{word}: {meaning}" for word, meaning in words_of([state]).items())


@dataclass(frozen=True, slots=True)
class Figure:
    """
    Args:
        shown: with its unit, and three digits that count.
        is_main: it is shown at once; the others are folded.
    """

    words: str
    shown: str
    meaning: str
    is_main: bool


def explained(figures: Mapping[str, Any]) -> list[Figure]:
    """The numbers among these figures, for people."""
    return [
        Figure(name.replace("_", " "), measured(name, value), FIGURES.get(name, ""), name in _MAIN)
        for name, value in figures.items()
        if value is None or isinstance(value, int | float)
    ]


def measured(name: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return figure(value)
    if name in _SHARES:
        return f"{100 * value:.3g} %"
    return f"{figure(value)} {_UNIT_OF[name]}" if name in _UNIT_OF else figure(value)


def _words(state: str) -> list[str]:
    """E.g. `active` and `head` of `active, head`. What follows a colon is a reason, in any words."""
    labels = state.split(":")[0].split(", ")
    return labels + ["files removed"] * state.endswith(", files removed")
