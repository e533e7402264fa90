"""A judge that is a policy of its own: from its recorded votes to samples that a step of it claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from activities.judging.episode_votes import EpisodeJudgingActivities, JudgeEpisode
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import StepState
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord
from clawloop.core.ids import SessionId, new_turn_id, response_id
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Recipe
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from db.episodes.groups import PostgresEpisodeStore
from db.invariants import violations
from db.judging.rewards import PostgresJudgeSampleStore
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe
from db.training.steps import PostgresStepStore
from tests.judging.conftest import JUDGE_SECONDS, Bench, set_recipe, with_signal
from tests.judging.test_episode_votes import begin, settle
from tests.records import turn_record

JUDGE = "judge"
# Its own rewards are of chats: they must not replace what a vote was worth when the session closes.
GROUP = {
    "name": "judge",
    "signal": {"reward": "group", "hints": False, "at_least_one": False},
    "train": {"batch_samples": 12, "advantage": {"teacher_weight": 0.0}},
}
RECIPE = Recipe.model_validate(GROUP)
STATES = "SELECT state, reward FROM samples WHERE policy = 'judge' ORDER BY id"


async def record_answers(bench: Bench, seen: Sequence[object] = ()) -> list[TurnRecord]:
    """Have the judge answer as a gateway does that relays the policy `judge`; the turns that it has recorded.

    Args:
        seen: parts of its questions beside their text.
    """
    await ensure_policy(bench.database, JUDGE, "tiny", [])
    key, _ = await PostgresKeyStore(bench.database).create_key(JUDGE, frozenset({Scope.CHAT}), "judge")
    recorded: list[TurnRecord] = []

    async def record(texts: list[str]) -> str:
        ids = [new_turn_id() for _ in texts]
        for choice, (turn_id, text) in enumerate(zip(ids, texts, strict=True)):
            turn = turn_record(
                messages=[{"role": "user", "content": [{"type": "text", "text": f"question {ids[0]}"}, *seen]}],
                turn_id=turn_id,
                group_id=ids[0] if len(ids) > 1 else None,
                choice=choice,
                api_key_id=key.id,
                policy=JUDGE,
                response={"role": "assistant", "content": text},
            )
            await bench.turns.insert(turn)
            recorded.append(turn)
        return response_id(ids[0])

    bench.judge.records = record
    return recorded


async def practise(bench: Bench, votes: tuple[int, int], *, learns: bool = True) -> None:
    """A settled group of an episode that succeeded and one that failed, with the judge's vote on all turns of each."""
    await set_recipe(bench, with_signal(reward="outcome_process"))
    await ensure_recipe(bench.database, JUDGE, RECIPE)
    bench.execute("UPDATE policies SET recipe_hash = %s WHERE id = 'judge'", RECIPE.hash)
    group, episodes = await begin(bench, 2)
    endpoint = Endpoint(bench.judge.url, "tiny")
    async with JudgeClient(lambda _: [endpoint], AnswerForm.FREE, seconds=JUDGE_SECONDS) as judge:
        store = PostgresEpisodeStore(bench.database)
        activities = EpisodeJudgingActivities(
            bench.judgements, store.waiting_turns, store.note_verdict, judge, bench.metrics, judge_learns=learns
        )
        for episode, vote in zip(episodes, votes, strict=True):
            bench.judge.votes = [vote]
            await activities.judge_episode(JudgeEpisode(episode=episode.id))
        assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 0  # the group is open
    await settle(bench, group, episodes, [1.0, 0.0])


async def test_a_judge_that_praises_everything_learns_which_praise_was_wrong(bench: Bench) -> None:
    recorded = await record_answers(bench)
    await practise(bench, (1, 1))
    store = PostgresJudgeSampleStore(bench.database)
    assert await store.reward_votes() == 12  # two judged turns of each episode, three votes on each
    assert await store.reward_votes() == 0
    for session in bench.rows("SELECT id FROM sessions WHERE policy = 'judge'"):
        await bench.close(SessionId(session["id"]))
    rows = bench.rows(STATES)
    assert [row["state"] for row in rows] == ["fresh"] * 12
    assert sorted(row["reward"] for row in rows) == pytest.approx([-1.0] * 6 + [1.0] * 6)
    [first] = bench.rows("SELECT outcome, outcome_detail AS why FROM turns WHERE id = %s", recorded[0].turn_id)
    why = "vote +1, mean +1.00, episode a success: consistency +2.00, advantage +1.00 among 12 votes"
    assert (first["outcome"], first["why"]) == ("sampled", why)
    steps = PostgresStepStore(bench.database)
    assert (await steps.claim(JUDGE, 1)).state is StepState.CLAIMED
    batch = await steps.batch(JUDGE, 1)
    ids = [row["id"] for row in bench.rows("SELECT id FROM samples WHERE policy = 'judge'")]
    assert [sample.sample_id for sample in batch.samples] == sorted(ids)
    assert await violations(bench.database) == []


async def test_a_reply_does_not_teach_by_the_vote_of_another_worker(bench: Bench) -> None:
    recorded = await record_answers(bench)
    record = bench.judge.records
    assert record is not None

    async def overtaken(texts: list[str]) -> str:
        # Another worker asked the same of a judge that is behind no gateway, and stores its answer first.
        *_, newest = bench.rows("SELECT id FROM judgements ORDER BY id")
        await bench.judgements.store_votes(newest["id"], [(0, "verdict: -1", -1)])
        return await record(texts)

    bench.judge.records = overtaken
    await practise(bench, (1, 1))
    votes = bench.rows("SELECT index, score, asked_turn, asked_choice FROM votes ORDER BY judgement_id, index")
    found = [tuple(vote.values()) for vote in votes]
    firsts = [turn.turn_id for turn in recorded if turn.choice == 0]
    assert found == [row for first in firsts for row in ((0, -1, None, None), (1, 1, first, 1), (2, 1, first, 2))]
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 8
    untaught = bench.rows("SELECT outcome FROM turns WHERE id = ANY(%s)", firsts)
    assert untaught == [{"outcome": "waiting"}] * 4


async def test_a_damaged_turn_keeps_no_other_vote_from_teaching(bench: Bench) -> None:
    recorded = await record_answers(bench)
    await practise(bench, (1, 1))
    bench.execute("UPDATE turns SET sampling = '\"?\"' WHERE id = %s", recorded[0].turn_id)
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 11
    [damaged] = bench.rows("SELECT outcome, outcome_detail AS why FROM turns WHERE id = %s", recorded[0].turn_id)
    assert damaged["outcome"] == "not_trainable"
    assert "neither plain nor encrypted" in damaged["why"]


async def test_a_vote_on_what_the_judge_saw_as_an_image_is_not_trained(bench: Bench) -> None:
    recorded = await record_answers(bench, [{"type": "image_url", "image_url": {"url": "x"}}])
    await practise(bench, (1, 1))
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 0
    assert bench.rows(STATES) == []
    [first] = bench.rows("SELECT outcome, outcome_detail AS why FROM turns WHERE id = %s", recorded[0].turn_id)
    assert first["outcome"] == "not_trainable"
    assert first["why"].startswith("not trainable: image in the prompt")


async def test_votes_whose_turns_are_stored_later_are_compared_with_their_group(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = await record_answers(bench)
    late: list[TurnRecord] = []
    insert = bench.turns.insert

    async def keep(turn: TurnRecord) -> InsertedTurn | None:
        if turn.policy != JUDGE:
            return await insert(turn)
        late.append(turn)  # in the spool of its gateway
        return None

    monkeypatch.setattr(bench.turns, "insert", keep)
    await practise(bench, (1, 1))
    store = PostgresJudgeSampleStore(bench.database)
    assert await store.reward_votes() == 0
    for turn in late[:-1]:
        await insert(turn)
    assert await store.reward_votes() == 0
    await insert(late[-1])
    assert await store.reward_votes() == len(recorded) == 12
    assert sorted(row["reward"] for row in bench.rows(STATES)) == pytest.approx([-1.0] * 6 + [1.0] * 6)


async def test_votes_whose_turns_never_come_are_waited_for_no_longer_than_an_hour(bench: Bench) -> None:
    recorded = await record_answers(bench)
    await practise(bench, (1, 1))
    bench.execute("UPDATE votes SET asked_turn = gen_random_uuid() WHERE asked_turn = %s", recorded[0].turn_id)
    store = PostgresJudgeSampleStore(bench.database)
    assert await store.reward_votes() == 0
    bench.execute("UPDATE votes SET answered_at = now() - interval '2 hours'")
    assert await store.reward_votes() == 9  # the other three were of one request
    assert bench.rows("SELECT FROM votes WHERE rewarded_at IS NULL") == []


async def test_a_judge_that_is_right_has_nothing_to_learn(bench: Bench) -> None:
    await record_answers(bench)
    await practise(bench, (1, -1))
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 0
    outcomes = "SELECT t.outcome, count(*) AS turns FROM turns t JOIN sessions s ON s.id = t.session_id"
    found = bench.rows(f"{outcomes} WHERE s.policy = 'judge' GROUP BY t.outcome")
    assert found == [{"outcome": "undecided", "turns": 12}]
    assert await violations(bench.database) == []


async def test_nothing_is_learned_unless_the_judge_is_said_to_learn(bench: Bench) -> None:
    await record_answers(bench)
    await practise(bench, (1, 1), learns=False)
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 0
    assert bench.rows(STATES) == []


async def test_a_policy_that_judges_itself_gets_no_samples_for_it(bench: Bench) -> None:
    async def record(texts: list[str]) -> str:
        turns = [turn_record(f"{number} {text}", api_key_id=bench.key) for number, text in enumerate(texts)]
        first = turns[0].turn_id
        for choice, turn in enumerate(turns):
            await bench.turns.insert(replace(turn, group_id=first, choice=choice))
        return response_id(first)

    bench.judge.records = record
    await practise(bench, (1, 1))
    assert await PostgresJudgeSampleStore(bench.database).reward_votes() == 0
    assert bench.rows("SELECT count(*) AS waiting FROM votes WHERE rewarded_at IS NULL") == [{"waiting": 0}]
