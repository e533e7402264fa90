"""One run of the demo against a fake gateway: counts, order of evaluations, and failures."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawloop.app.demo import admin_client, experiment, openai_client
from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.experiment import Experiment, PolicyAccess, TrainingPaused, rounds, run_experiment
from clawloop.app.demo.openai_client import ChatClient
from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.report import Evaluation, RunTotals, report_run
from clawloop.app.demo.run import keep_match
from clawloop.app.demo.sessions import TasteUser, ToyUser
from clawloop.app.demo.world import Axis
from clawloop.app.local.checks import choose_port
from clawloop.app.local.supervision.supervisor import PartStatus
from clawloop.core.errors import SetupError
from db.database import Database
from db.training.policies import PostgresMeasurements
from tests.fakes.engine import serving
from tests.fakes.scripted_gateway import ScriptedGateway, scripted_gateway

RUN = PlannedRun(1, Method.COMBINED)


class Board:
    def __init__(self) -> None:
        self.rows: list[Evaluation] = []
        self.lines: list[str] = []

    def add_evaluation(self, run: PlannedRun, row: Evaluation) -> None:
        self.rows.append(row)

    def status(self, run: PlannedRun, text: str) -> None:
        pass

    def changed(self, status: PartStatus) -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "_RETRY_PAUSES", (0.0, 0.0, 0.0))


def planned(interactions: int, *, paced: bool = True, flip: tuple[Axis, ...] = (), measure_every: int = 1) -> Plan:
    return Plan((RUN,), interactions, paced, flip, measure_every)


async def run_plan(gateway: ScriptedGateway, plan: Plan) -> tuple[list[Evaluation], RunTotals]:
    access = PolicyAccess(gateway.url, "key", "admin", "tiny")
    async with ChatClient(gateway.url, "key") as client, AdminClient(gateway.url, "admin") as admin:
        run = Experiment(RUN, access, client, admin, Board(), plan, ToyUser(RUN.seed), wait_timeout_seconds=120)
        await run.execute()
        return run.evaluations, await run.totals()


def test_rounds_add_up_and_none_is_empty() -> None:
    for interactions in range(1, 70):
        planned = rounds(interactions, ToyUser(1))
        assert sum(map(sum, planned)) == interactions
        assert all(sizes and all(sizes) for sizes in planned)


def test_sessions_with_a_model_have_two_to_four_turns_and_go_on_after_a_flip_as_numbered() -> None:
    user = TasteUser(5, lambda line: None)
    planned = rounds(64, user)
    sizes = [size for at_once in planned for size in at_once]
    assert {len(at_once) for at_once in planned[:-1]} == {4}
    assert sum(sizes) == 64
    assert set(sizes[:-1]) == {2, 3, 4}
    assert rounds(10, user, first=3)[0][:2] == sizes[2:4]


@pytest.mark.slow
async def test_every_version_is_measured_once_and_every_request_of_a_session_is_an_interaction() -> None:
    async with scripted_gateway() as gateway:
        rows, totals = await run_plan(gateway, planned(40))
    asked = [headers for headers in gateway.headers if "x-turn-type" not in headers]
    assert len(asked) == sum(map(len, gateway.sessions.values())) == 40 == totals.interactions
    done = [headers for headers in asked if headers.get("x-session-done") == "true"]
    assert len(done) == len(gateway.sessions)
    versions = [row.version for row in rows]
    assert versions == list(range(gateway.version + 1))
    assert gateway.version >= 3
    names = ["tiny", *(f"demo-1-combined-v{version}" for version in versions[1:])]
    assert gateway.temperatures == {True: {None}, False: {1.0}}
    assert gateway.side_turn_models == [name for name in names for _ in range(60)]
    assert [row.failed for row in rows] == [0] * len(versions)


@pytest.mark.slow
async def test_the_report_shows_the_improvement() -> None:
    async with scripted_gateway(improvement=0.5) as gateway:
        rows, totals = await run_plan(gateway, planned(40))
    report = report_run(planned(40), RUN, rows, totals, 12.0)
    first = next(row for row in rows if row.match >= 0.9)
    assert report.match_before < 0.7
    assert report.match_after == 1.0
    assert report.interactions_to_90 == first.interactions
    assert report.exact_rate == 1.0
    assert report.steps >= report.versions > 1
    assert 0 < report.seconds < 60


async def test_a_paced_user_waits_for_late_turns() -> None:
    async with scripted_gateway(arrival_delay=4) as gateway:
        _, totals = await run_plan(gateway, planned(8))
        assert gateway.arrival_delay == 0
    assert (totals.recorded, totals.gave_up) == (8, None)


@pytest.mark.slow
@pytest.mark.parametrize("paced", [True, False])
async def test_a_flipped_preference_is_learned_again(paced: bool) -> None:
    async with scripted_gateway(
        improvement=0.5, flip=(Axis.CODE, Axis.TONE), flip_after=40, publish_delay=1
    ) as gateway:
        plan = planned(81, paced=paced, flip=(Axis.CODE, Axis.TONE))
        rows, totals = await run_plan(gateway, plan)
    report = report_run(plan, RUN, rows, totals, 12.0)
    assert (report.interactions, report.flipped_at) == (81, 40)
    after = [row for row in rows if row.flipped]
    assert rows[-len(after) :] == after
    assert report.relearned_after is not None
    assert 0 < report.relearned_after <= 41
    assert report.relearned_after == next(row.interactions for row in after if row.match >= 0.9) - 40
    if paced:
        last = rows[-len(after) - 1]
        assert (after[0].version, after[0].interactions) == (last.version, 40)
        assert last.match >= 0.9
        assert after[0].match < 0.7


@pytest.mark.slow
async def test_measure_every_skips_later_versions_but_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "FULLY_MEASURED_INTERACTIONS", 20)
    async with scripted_gateway(publish_delay=1) as gateway:
        rows, _ = await run_plan(gateway, planned(100, measure_every=4))
    versions = [row.version for row in rows]
    closely = [row.version for row in rows if row.interactions <= 20]
    assert closely == list(range(closely[-1] + 1))
    assert versions[-1] == gateway.version
    steps = [after - before for before, after in pairwise(versions) if after > closely[-1]]
    assert all(step >= 4 for step in steps[:-1])
    assert steps[-1] > 0
    assert len(steps) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("paced", [True, False])
async def test_chat_sessions_are_found_behind_a_page_of_evaluation_sessions(
    monkeypatch: pytest.MonkeyPatch, paced: bool
) -> None:
    monkeypatch.setattr(admin_client, "_PAGE_SIZE", 130)  # two evaluations and a round of chats
    board = Board()
    async with scripted_gateway(publish_delay=1) as gateway:
        _, totals = await run_experiment(
            RUN, PolicyAccess(gateway.url, "key", "admin", "tiny"), board, planned(64, paced=paced)
        )
    assert board.lines == []
    assert gateway.version > 3
    assert totals.steps > gateway.version // 2


@pytest.mark.slow
async def test_without_pace_versions_are_evaluated_during_the_chat() -> None:
    async with scripted_gateway(publish_delay=1) as gateway:
        rows, totals = await run_plan(gateway, planned(64, paced=False))
    assert rows[-1].version == gateway.version > 0
    assert totals.interactions == 64


@pytest.mark.parametrize("failures", [["500"], ["BREAK"], ["ERROR"], ["500", "BREAK", "ERROR"]])
async def test_each_failure_counts_and_the_chat_goes_on(failures: list[str]) -> None:
    async with scripted_gateway() as gateway:
        async with ChatClient(gateway.url, "key") as client:
            gateway.failures = list(failures)
            reply = await client.send_main_turn([{"role": "user", "content": "What is rain?"}], "s", last=False)
            assert reply.text
            assert client.failed == len(failures)
            gateway.failures = ["500"]
            assert (await client.send_side_turn("What is rain?", "tiny", "e")).text
            assert client.failed == len(failures) + 1


async def test_a_version_that_is_gone_before_it_is_measured_is_passed_over() -> None:
    async with scripted_gateway(gone=1) as gateway:
        rows, totals = await run_plan(gateway, planned(40))
    assert [row.version for row in rows][:2] == [0, 2]
    assert totals.interactions == 40


async def test_a_gateway_that_is_away_for_long_is_waited_for() -> None:
    async with scripted_gateway(failures=["500"] * 30) as gateway:
        async with ChatClient(gateway.url, "key") as client:
            assert (await client.send_side_turn("What is rain?", "tiny", "e")).text
            assert client.failed == 30


async def test_an_admin_api_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "_RETRY_SECONDS", 0.02)
    port = choose_port("the gateway", "127.0.0.1", 0, "")
    async with AdminClient(f"http://127.0.0.1:{port}", "admin") as admin:
        asking = asyncio.create_task(admin.training_status("demo-1-combined"))
        await asyncio.sleep(0.2)
        assert not asking.done()
        async with scripted_gateway(port=port):
            assert (await asyncio.wait_for(asking, 30)).version == 0


@pytest.mark.parametrize("before", [[], [""] * 62], ids=["while measuring", "in the chat"])
async def test_a_gateway_that_stops_answering_ends_the_run(before: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "PATIENCE_SECONDS", 0.2)
    async with scripted_gateway(failures=[*before, *["500"] * 100_000]) as gateway:
        with pytest.raises(SetupError, match=r"does not answer the demo's requests: .*on purpose"):
            await run_plan(gateway, planned(8))


async def test_paused_training_ends_the_run_with_its_reason() -> None:
    async with scripted_gateway(pause_reason="step 3: KL 12 over 10", judging_stuck=True) as gateway:
        with pytest.raises(TrainingPaused, match="paused itself: step 3: KL 12 over 10"):
            await run_plan(gateway, planned(8))
        kept: list[Evaluation] = []

        async def keep(row: Evaluation) -> None:
            kept.append(row)

        access = PolicyAccess(gateway.url, "key", "admin", "tiny")
        rows, totals = await run_experiment(RUN, access, Board(), planned(8), keep)
    assert totals.stopped == "training of demo-1-combined has paused itself: step 3: KL 12 over 10"
    assert (totals.interactions, totals.gave_up) == (8, None)
    assert len(rows) == 1
    assert kept == rows


async def test_a_database_that_is_away_costs_the_page_a_figure_and_not_the_run() -> None:
    board = Board()
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    row = Evaluation(step=1, version=1, interactions=8, reward=None, match=0.5, exact=1.0, failed=0, seconds=1.0)
    await keep_match(PostgresMeasurements(database), RUN, board, row)
    await database.close()
    [line] = board.lines
    assert line.startswith("the page does not show the match of version 1: ")


@pytest.mark.parametrize(("stuck", "recorded"), [({"judging_stuck": True}, 8), ({"arrival_delay": 10**6}, 0)])
async def test_waiting_for_turns_that_are_never_learned_or_never_stored_times_out(
    stuck: dict[str, Any], recorded: int
) -> None:
    async with scripted_gateway(**stuck) as gateway:
        access = PolicyAccess(gateway.url, "key", "admin", "tiny")
        board = Board()
        async with ChatClient(gateway.url, "key") as client, AdminClient(gateway.url, "admin") as admin:
            run = Experiment(RUN, access, client, admin, board, planned(8), ToyUser(RUN.seed), wait_timeout_seconds=0.5)
            await run.execute()
            totals = await run.totals()
    assert board.lines == ["demo-1-combined: gave up waiting after 0.5 s: waits for samples"]
    assert totals.gave_up == "gave up waiting after 0.5 s: waits for samples"
    assert (totals.interactions, totals.recorded) == (8, recorded)


async def test_a_turn_that_is_stored_twice_does_not_make_up_for_a_missing_one() -> None:
    async with scripted_gateway() as gateway:
        access = PolicyAccess(gateway.url, "key", "admin", "tiny")
        async with ChatClient(gateway.url, "key") as client, AdminClient(gateway.url, "admin") as admin:
            run = Experiment(
                RUN, access, client, admin, Board(), planned(8), ToyUser(RUN.seed), wait_timeout_seconds=120
            )
            await run.execute()
            repeated, shortened = gateway.sessions.values()
            repeated.append(repeated[-1])
            shortened.pop()
            totals = await run.totals()
    assert (totals.interactions, totals.recorded) == (8, 7)


async def test_a_missing_admin_api_is_a_setup_error() -> None:
    async with scripted_gateway() as gateway:
        async with AdminClient(f"{gateway.url}/nowhere", "admin") as admin:
            with pytest.raises(SetupError, match="cannot be read: 404"):
                await admin.training_status("demo")


async def test_an_answer_of_another_version_names_what_is_missing() -> None:
    def training(request: Request) -> Response:
        return JSONResponse({"policy": "demo"})

    async with serving(Starlette(routes=[Route("/admin/v1/training", training)])) as url:
        async with AdminClient(url, "admin") as admin:
            with pytest.raises(SetupError, match="answers otherwise than this version: state: Field required"):
                await admin.training_status("demo")
