"""What `benchmarks.direct_vote` counts, with a judge whose answers are known."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks.direct_vote import DIRECT, SAMPLED, Judged, compare
from clawloop.demo.phrasing import Feedback, Mood
from clawloop.judging.parsing import Vote
from clawloop.judging.prompts import JudgePrompt
from clawloop.judging.voting import direct_vote, majority

LIKED, DISLIKED = Feedback("thanks", Mood.LIKED), Feedback("nope", Mood.DISLIKED)
TOLD = [LIKED, LIKED, LIKED, DISLIKED, DISLIKED]  # each contender is the first on one of them


class Scripted:
    """Direct votes and five are always 1, three always −1; one changes at each question, nine cannot be read."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.prompts: list[JudgePrompt] = []

    async def judge(self, prompt: JudgePrompt, votes: int) -> Judged:
        self.asked.append(votes)
        self.prompts.append(prompt)
        if votes == DIRECT:
            return Judged(direct_vote({1: -0.1, 0: -3.0, -1: -3.0}), read=100, written=1)
        changing: Vote = 1 if self.asked.count(votes) % 2 else -1
        says: dict[int, Vote | None] = {1: changing, 3: -1, 5: 1, 9: None}
        return Judged(majority([says[votes]] * votes), read=100, written=None if votes == 9 else 2 * votes)


async def test_each_contender_is_counted_against_the_phrase_the_direct_vote_and_itself() -> None:
    tallies = await compare(Scripted(), TOLD, seed=0)
    liked = [True, True, True, False, False]
    assert set(tallies) == {DIRECT, *SAMPLED}
    assert tallies[DIRECT].right == tallies[1].right == tallies[5].right == liked
    assert tallies[3].right == [not right for right in liked]
    assert tallies[9].right == [False] * 5
    with_direct = {votes: set(tally.with_direct) for votes, tally in tallies.items()}
    assert with_direct == {DIRECT: {True}, 1: {True}, 3: {False}, 5: {True}, 9: {False}}
    with_itself = {votes: set(tally.with_itself) for votes, tally in tallies.items()}
    assert with_itself == {DIRECT: {True}, 1: {False}, 3: {True}, 5: {True}, 9: {True}}


async def test_rates_are_of_the_phrases_that_have_the_vote() -> None:
    tallies = await compare(Scripted(), TOLD, seed=0)
    assert tallies[3].verdicts == {1: [-1] * 3, -1: [-1] * 2}
    assert (tallies[3].rate(1), tallies[3].rate(-1)) == (0.0, 1.0)
    tallies[3].verdicts[1].append(1)
    assert (tallies[3].rate(1), tallies[3].rate(-1)) == (0.25, 1.0)


async def test_tokens_are_of_one_judgement_and_nothing_where_the_judge_does_not_say() -> None:
    tallies = await compare(Scripted(), TOLD, seed=0)
    written = {votes: tally.written for votes, tally in tallies.items()}
    assert written == {DIRECT: [1] * 5, 1: [2] * 5, 3: [6] * 5, 5: [10] * 5, 9: []}
    assert {tuple(tally.read) for tally in tallies.values()} == {(100,) * 5}


async def test_each_contender_is_timed_where_it_was_the_first_to_read_the_phrase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = Scripted()
    # Only a prompt that was not read before takes time.
    clock = SimpleNamespace(perf_counter=lambda: float(len(set(map(id, judge.prompts)))))
    monkeypatch.setattr("benchmarks.direct_vote.time", clock)
    tallies = await compare(judge, TOLD, seed=0)
    of_a_phrase = [judge.asked[at : at + 10] for at in range(0, len(judge.asked), 10)]
    assert [asked[0] for asked in of_a_phrase] == [DIRECT, *SAMPLED]
    assert [tally.seconds for tally in tallies.values()] == [[1.0]] * 5
    assert [set(Counter(asked).values()) for asked in of_a_phrase] == [{2}] * 5
    assert [len(set(map(id, judge.prompts[at : at + 10]))) for at in range(0, 50, 10)] == [1] * 5
