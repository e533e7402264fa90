"""Meanings of the words and figures of versions, for people who read them for the first time."""

from __future__ import annotations

from collections.abc import Iterable

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
    "compared": "probes on which a judge compared it with its parent",
    "preferred": "probes on which the judge preferred it",
    "parent_preferred": "probes on which the judge preferred its parent",
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


def words_of(states: Iterable[str]) -> dict[str, str]:
    """The words that occur in these states of versions, with what they mean."""
    found = {word for state in states for word in _words(state)}
    return {word: meaning for word, meaning in STATES.items() if word in found}


def meaning_of(state: str) -> str:
    """Meaning of a version's state, in one line."""
    return "; ".join(f"{word}: {meaning}" for word, meaning in words_of([state]).items())


def explained(figures: Iterable[str]) -> dict[str, str]:
    """Meanings of these figures, without the self-explanatory ones."""
    return {name: FIGURES[name] for name in figures if name in FIGURES}


def _words(state: str) -> list[str]:
    """E.g. `active` and `head` of `active, head`. What follows a colon is a reason, in any words."""
    labels = state.split(":")[0].split(", ")
    return labels + ["files removed"] * state.endswith(", files removed")
