"""The user with a taste, against a scripted model: what is asked, said, rated and measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessageParam

from clawloop.app.demo.openai_client import MAX_TOKENS, ChatClient, Reply
from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.report import Evaluation as Row
from clawloop.app.demo.report import RunTotals, report_run
from clawloop.app.demo.report_formats import as_json, read_report, taste_lines
from clawloop.app.demo.sessions import Scores, TasteUser, as_notes
from clawloop.app.demo.tastes import HELD_OUT, Answer, Taste, tastes_to_learn, told
from clawloop.core.errors import SetupError
from clawloop.core.gate.general import ANSWER_TOKENS, general_questions

BASE, LEARNED = "smollm2", "demo-3-hindsight-v2"
RAMBLING = "The sea may rise and it may fall, which can take hours, and often more. " * 5
RAMBLED = len(RAMBLING.split())


def _first_answer(pattern: str) -> str:
    """The first of the words that a general question's pattern takes."""
    return pattern.split("[.,])(?:", 1)[1].split("|")[0].split(")")[0]


ANSWERS = {
    str(question.content.messages[0]["content"]): _first_answer(question.content.regex or "")
    for question in general_questions()
}
TOLD_TO_BE_BRIEF = [told(Taste.BRIEF, number) for number in range(16)]


class ScriptedModel(ChatClient):
    """Rambles as the base model unless it is told to be brief, and is brief and knows less as any version."""

    def __init__(self, *, is_led: bool = True) -> None:
        super().__init__("http://nowhere", "key")
        self.asked: list[tuple[str, str, str | None, float | None, int]] = []
        self.chats: list[list[ChatCompletionMessageParam]] = []
        self.rated: list[tuple[str, int]] = []
        self.forgotten = 0
        self.is_led = is_led

    async def send_main_turn(
        self, messages: list[ChatCompletionMessageParam], session: str, *, last: bool, temperature: float | None = None
    ) -> Reply:
        assert temperature is None
        self.chats.append([*messages])
        return Reply(f"chatcmpl-{len(self.chats)}", BASE, RAMBLING, ended=True)

    async def send_side_turn(
        self,
        text: str,
        model: str,
        session: str,
        *,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> Reply:
        assert session.isascii(), "a header's value"
        self.asked.append((text, model, system, temperature, max_tokens))
        if text in ANSWERS:
            knows = model == BASE or sum(each[0] in ANSWERS for each in self.asked) > self.forgotten
            return Reply("chatcmpl-0", model, f"It is {ANSWERS[text]}." if knows else "I forgot.", ended=True)
        rambles = model == BASE and not (self.is_led and text in TOLD_TO_BE_BRIEF)
        return Reply("chatcmpl-0", model, RAMBLING if rambles else "The sea rises and falls.", ended=True)

    async def rate(self, reply: Reply, thumb: int) -> None:
        self.rated.append((reply.id, thumb))


def brief_seed() -> int:
    """A seed whose user wants brief replies of a model that rambles."""
    rambling = [Answer(RAMBLING, ended=True)]
    return next(seed for seed in range(1, 100) if tastes_to_learn(seed, rambling)[0] is Taste.BRIEF)


@pytest.fixture
async def user() -> TasteUser:
    return TasteUser(brief_seed(), lambda line: None)


async def test_the_base_model_decides_on_the_taste_and_on_the_facts() -> None:
    said: list[str] = []
    client, user = ScriptedModel(), TasteUser(brief_seed(), said.append)
    found = await user.measure(client, BASE, thorough=False)
    assert (user.taste, found.match, found.exact, found.requests) == (Taste.BRIEF, 0.0, 1.0, 32)
    assert [asked[0] for asked in client.asked[:32]] == list(HELD_OUT[:32])
    assert [asked[0] for asked in client.asked[32:48]] == TOLD_TO_BE_BRIEF
    facts = client.asked[48:]
    sampled = facts[:-40]
    assert [asked[0] for asked in sampled[: len(ANSWERS)]] == list(ANSWERS)
    # Those that are right once are asked again: an answer with the first words of its pattern may not be.
    assert {asked[0] for asked in sampled[len(ANSWERS) :]} < ANSWERS.keys()
    assert len(sampled) > 1.9 * len(ANSWERS)
    assert {asked[3:] for asked in sampled} == {(0.6, ANSWER_TOKENS)}
    assert {asked[3:] for asked in facts[-40:]} == {(0.0, ANSWER_TOKENS)}
    [line] = said
    assert line.startswith("the user's hidden taste: brief (at most 40 words, and ended); the base model knows ")


async def test_a_taste_that_words_do_not_teach_is_passed_over_and_told() -> None:
    rambling = [Answer(RAMBLING, ended=True)]
    tastes = {seed: tastes_to_learn(seed, rambling) for seed in range(1, 100)}
    seed = next(seed for seed, order in tastes.items() if order.index(Taste.BRIEF) == 2)
    said: list[str] = []
    client, user = ScriptedModel(), TasteUser(seed, said.append)
    await user.measure(client, BASE, thorough=False)
    assert user.taste is Taste.BRIEF
    assert (await user.findings(client, BASE)).told == dict(zip(tastes[seed][:3], (0.0, 0.0, 1.0), strict=True))
    assert [line.split(" (")[0] for line in said] == [
        *(f"passed over: a taste for {taste}" for taste in tastes[seed][:2]),
        "the user's hidden taste: brief",
    ]
    assert said[0].endswith("told so, it has 0% of its replies in taste, untold 0%")


async def test_a_model_that_follows_no_words_has_a_user_all_the_same() -> None:
    rambling = [Answer(RAMBLING, ended=True)]
    client, user = ScriptedModel(is_led=False), TasteUser(5, lambda line: None)
    await user.measure(client, BASE, thorough=False)
    assert user.taste is tastes_to_learn(5, rambling)[0]
    assert len((await user.findings(client, BASE)).told) == len(tastes_to_learn(5, rambling)) >= 5


async def test_versions_are_asked_less_between_than_at_the_end(user: TasteUser) -> None:
    client = ScriptedModel()
    await user.measure(client, BASE, thorough=False)
    client.asked.clear()
    between = await user.measure(client, "demo-3-hindsight-v1", thorough=False)
    assert (between.match, between.exact, between.requests, between.words, between.cut, between.loops) == (
        1.0,
        1.0,
        16,
        5.0,
        0.0,
        0,
    )
    assert (len(client.asked), sum(asked[0] in ANSWERS for asked in client.asked)) == (16 + 40, 40)
    client.asked.clear()
    client.forgotten = 10
    last = await user.measure(client, LEARNED, thorough=True)
    assert (last.requests, last.exact) == (32, 0.75)
    assert sum(asked[0] in ANSWERS for asked in client.asked) == 40


async def test_a_session_reacts_rates_and_keeps_what_was_wished_for_as_notes(user: TasteUser) -> None:
    client = ScriptedModel()
    await user.measure(client, BASE, thorough=False)
    counted: list[None] = []
    for number in range(1, 9):
        await user.chat(client, number, f"s{number}", user.session_requests(number), lambda: counted.append(None))
    sizes = [user.session_requests(number) for number in range(1, 9)]
    assert set(sizes) <= {2, 3, 4}
    assert sum(sizes) == len(client.chats) == len(counted)
    assert client.rated
    assert {thumb for _, thumb in client.rated} == {-1}
    client.asked.clear()
    found = await user.findings(client, BASE)
    [system] = {asked[2] for asked in client.asked}
    assert system is not None
    _, *notes = system.splitlines()
    assert system == as_notes(note.removeprefix("- ") for note in notes)
    chatted = " ".join(str(message["content"]) for chat in client.chats for message in chat)
    assert len(notes) == found.note_lines > 5
    assert all(note.removeprefix("- ") in chatted for note in notes)
    assert {asked[1] for asked in client.asked} == {BASE}
    assert (found.taste, found.notes.match, found.notes.exact, found.notes.requests) == ("brief", 0.0, 1.0, 32)


async def test_a_base_model_that_knows_nothing_ends_the_run_with_a_line(
    user: TasteUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWERS, next(iter(ANSWERS)), "nothing")
    for question in ANSWERS:
        monkeypatch.setitem(ANSWERS, question, "unknown to me")
    with pytest.raises(SetupError, match="answers none of the general questions"):
        await user.measure(ScriptedModel(), BASE, thorough=False)


async def test_the_end_shows_frozen_trained_and_notes_and_three_replies_before_and_after(
    user: TasteUser, tmp_path: Path
) -> None:
    client = ScriptedModel()
    rows = [_row(0, await user.measure(client, BASE, thorough=False))]
    await user.chat(client, 1, "s", 4, lambda: None)
    rows.append(_row(2, await user.measure(client, LEARNED, thorough=True)))
    run = PlannedRun(3, Method.HINDSIGHT)
    plan = Plan((run,), 64, paced=True, model="smollm2")
    totals = RunTotals(64, 0, 2, 2, 60.0, taste=await user.findings(client, BASE))
    report = report_run(plan, run, rows, totals, 20.0)
    head, frozen, trained, notes, told_once, *others = taste_lines(report)
    assert head == "taste: brief (at most 40 words, and ended), on 32 held-out requests"
    shown = [" ".join(line.split()) for line in (frozen, trained)]
    assert shown == [
        f"frozen in taste 0%, facts 100%, words {RAMBLED}, cut 0%, loops 32",
        "version 2 in taste 100%, facts 100%, words 5, cut 0%, loops 0",
    ]
    assert notes.strip().startswith("frozen, ")
    assert " ".join(told_once.split()) == "frozen, told once in taste 100%, on 16 of them"
    first = others.index(f"> {HELD_OUT[0]}")
    unasked, examples = others[:first], others[first:]
    assert " ".join(" ".join(unasked).split()).startswith("not asked for, frozen → version 2: prose ")
    assert "brief" not in "".join(unasked)
    assert max(map(len, unasked)) <= 80
    assert [line for line in examples if line.startswith("> ")] == [f"> {request}" for request in HELD_OUT[:3]]
    assert examples[2] == "  after:  The sea rises and falls."
    assert examples[1].endswith(" …")
    path = tmp_path / "demo-report.json"
    path.write_text(as_json([report], 60.0))
    assert read_report(path)[0] == [report]


def _row(version: int, found: Scores) -> Row:
    return Row(
        step=version,
        version=version,
        interactions=0,
        reward=None,
        match=found.match,
        exact=found.exact,
        failed=0,
        seconds=0.0,
        requests=found.requests,
        words=found.words,
        cut=found.cut,
        loops=found.loops,
    )
