"""What benchmarks compute from their measurements, and which ratios count as worse."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import orjson
import psutil
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks import __main__ as program
from benchmarks import gateway, openclaw_learns, report, soak
from benchmarks.__main__ import PRINTING, PROGRAMS, RATIOS, SLACK, is_much_worse, main
from benchmarks.chaos import as_json, late
from benchmarks.gateway import DIRECT, LITELLM, NOTIFYING, PARSING, RECORDING, Case, _ratios, _row
from benchmarks.load import Chats, Load, answer_text, closed_loop
from benchmarks.openclaw_learns import Preference
from benchmarks.options import sizes
from benchmarks.processes import cpu_by_part
from benchmarks.report import Ratio, Result, write_result
from clawloop.app.local.supervision.supervisor import PartState, PartStatus
from tests.chaos.run import Outcome
from tests.fakes.engine import serving


def test_every_listed_benchmark_exists() -> None:
    modules = [f"benchmarks.{name.replace('-', '_')}" for name in PROGRAMS] + [
        module for module, _ in PRINTING.values()
    ]
    assert all(importlib.util.find_spec(module) for module in modules)
    assert json.loads(RATIOS.read_text()).keys() <= PROGRAMS.keys()
    assert main(["nothing"]) == 2


def test_the_cpu_time_of_a_part_holds_that_of_its_children_that_have_ended() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); input()"
    parent = subprocess.Popen([sys.executable, "-c", program, "a-part"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        # The program and its imports alone take a tenth of half a second.
        while psutil.Process(parent.pid).children() or cpu_by_part({"part": "a-part"})["part"] < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert cpu_by_part({"part": "another-part"}) == {"part": 0.0}
    finally:
        parent.communicate(b"\n")


@pytest.mark.parametrize(
    ("found", "worse"),
    [
        (Ratio(2.0 * SLACK, "lower"), False),
        (Ratio(2.01 * SLACK, "lower"), True),
        (Ratio(2.0 / SLACK, "higher"), False),
        (Ratio(1.99 / SLACK, "higher"), True),
        (None, True),
    ],
)
def test_a_ratio_is_worse_beyond_the_slack_or_when_missing(found: Ratio | None, worse: bool) -> None:
    assert is_much_worse(found, 2.0) is worse


@pytest.mark.parametrize(
    ("found", "committed", "worse"),
    [
        (Ratio(1.003, "lower", enough=1.0), 0.685, False),
        (Ratio(1.6, "lower", enough=1.0), 0.685, True),
        (Ratio(1.6, "lower", enough=1.0), 1.2, False),
        (Ratio(0.7, "higher", enough=1.0), 1.3, False),
        (Ratio(0.6, "higher", enough=1.0), 1.3, True),
        (Ratio(1.0, "lower", 5.0, enough=5.0), -0.3, False),
    ],
)
def test_a_committed_value_that_is_luck_fails_no_later_run(found: Ratio, committed: float, worse: bool) -> None:
    assert is_much_worse(found, committed) is worse


def test_medians_of_several_runs_are_committed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = iter([0.4, 1.0, 1.1])

    def quick(name: str, arguments: Sequence[str], console: Console) -> Result:
        value = next(values)
        rare = {"only in the first": Ratio(1.0, "lower")} if value == 0.4 else {}
        return Result(ratios={"x": Ratio(value, "lower", 1.5)} | rare)

    monkeypatch.setattr(program, "run", quick)
    monkeypatch.setattr(program, "RATIOS", tmp_path / "ratios.json")
    (tmp_path / "ratios.json").write_text('{"judging": {"y": {"value": 2.0, "better": "lower"}}}')
    assert main(["commit", "gateway", "--runs", "3"]) == 0
    committed = json.loads((tmp_path / "ratios.json").read_text())
    assert committed["gateway"] == {"x": {"value": 1.0, "better": "lower"}}
    assert committed["judging"] == {"y": {"value": 2.0, "better": "lower"}}


def test_a_stream_s_text_is_read_without_parsing_its_events() -> None:
    events = [
        {"delta": {"role": "assistant", "content": ""}, "logprobs": None},
        {"delta": {"content": 'say "\u00e9'}, "logprobs": {"content": [{"token": "x", "bytes": [32]}]}},
        {"delta": {"reasoning_content": "no"}},
        {"delta": {"content": '"\n\\ \U0001f600'}},
    ]
    for write in (json.dumps, orjson.dumps):
        written = [write({"choices": [event]}) for event in events]
        lines = [line if isinstance(line, bytes) else line.encode() for line in written]
        assert answer_text(b"".join(b"data: " + line + b"\n\n" for line in lines)) == 'say "é"\n\\ 😀'


@pytest.mark.parametrize("named", [False, True])
async def test_a_conversation_goes_on_with_what_the_server_answered(named: bool) -> None:
    asked: list[tuple[str | None, list[dict[str, str]]]] = []

    async def chat(request: Request) -> Response:
        asked.append((request.headers.get("x-session-id"), (await request.json())["messages"]))
        answer = json.dumps({"choices": [{"delta": {"content": f" answer {len(asked)}"}}]})
        return Response(f"data: {answer}\n\ndata: [DONE]\n\n", media_type="text/event-stream")

    chats = Chats(1, conversations=2, turns=3, prompt_tokens=1000, growth_tokens=100, names_session=named)
    load = Load()
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    async with serving(app, 0) as url, aiohttp.ClientSession() as client:
        await closed_loop(client, url, "tiny", chats, 7, load)
    assert load.failures == []
    assert len(load.whole_seconds) == chats.requests == 6
    for first in (0, 3):
        for turn in (1, 2):
            (_, before), (_, messages) = asked[first + turn - 1 : first + turn + 1]
            answer = {"role": "assistant", "content": f" answer {first + turn}"}
            assert messages[:-1] == [*before, answer]
    tokens = [sum(len(message["content"]) for message in messages) / 4 for _, messages in asked]
    assert tokens == pytest.approx([900, 1000, 1100] * 2, abs=5)
    questions = [messages[-1]["content"][:8] for _, messages in asked]
    assert questions == [f"{number:08d}" for number in range(7, 13)]
    assert [session for session, _ in asked] == (["bench-7"] * 3 + ["bench-10"] * 3 if named else [None] * 6)


def _gateway_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    gateway.add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("case", [Case(1, 1000, 0), Case(64, 1000, 0), Case(64, 1000, 20), Case(16, 32_000, 0)])
def test_all_servers_get_whole_conversations_of_the_same_size(case: Case) -> None:
    options = _gateway_options("--quick")
    for server in (DIRECT, LITELLM, RECORDING):
        chats = gateway._chats(case, gateway._requests(case, server, options), options)
        assert chats.turns == 4
        assert chats.conversations % case.streams == 0
        assert chats.requests >= case.streams * 4
        assert sum(map(chats.tokens, range(4))) == 4 * case.prompt_tokens
    warm_up = gateway._chats(case, 0, options)
    assert (warm_up.requests, warm_up.tokens(0)) == (case.streams, case.prompt_tokens)


def test_prompts_that_leave_no_room_for_a_conversation_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--quick", "--prompts", "300"]) == 1
    assert "--prompts 300: 108 tokens are left for the first of 4 turns" in capsys.readouterr().err


def _load(seconds: float, cpu: float | None, wall: float = 1.0) -> Load:
    return Load(first_seconds=[0.01] * 4, whole_seconds=[seconds] * 4, wall_seconds=wall, cpu_seconds=cpu)


def test_a_server_is_compared_with_the_direct_client_and_the_parsing_relay() -> None:
    loads = {
        DIRECT: _load(1.30, None),
        PARSING: _load(1.32, 0.02),
        LITELLM: _load(1.6, 0.4, wall=40.0),
        RECORDING: _load(1.34, 0.04, wall=2.0),
        NOTIFYING: _load(1.5, 0.05, wall=4.0),
    }
    row = _row(Case(64, 1000, 20), RECORDING, loads[RECORDING], loads[DIRECT], tokens=64)
    assert row["added p50 ms"] == pytest.approx(40)
    assert row["CPU ms/request"] == pytest.approx(10)
    assert row["keeps pace"] == 1.0  # 64 tokens at 20 ms, and a tenth more: 1.41 s
    assert _row(Case(64, 1000, 20), NOTIFYING, loads[NOTIFYING], loads[DIRECT], tokens=64)["keeps pace"] == 0.0
    found = {name.split(": ")[1]: ratio for name, ratio in _ratios(Case(64, 1000, 0), loads, tokens=64).items()}
    assert found["CPU a request, to the parsing relay's"].value == pytest.approx(2.0)
    assert found[f"requests/s of {RECORDING}, to the parsing relay's"] == Ratio(0.5, "higher", 0.5)
    assert found[f"requests/s of {NOTIFYING}, to the parsing relay's"] == Ratio(0.25, "higher", None)
    assert found["requests/s, to LiteLLM's"] == Ratio(20.0, "higher", 20.0)
    (pace,) = [ratio for name, ratio in _ratios(Case(256, 1000, 20), loads, 64).items() if "keep pace" in name]
    assert pace == Ratio(1.0, "higher", 0.7)


def test_a_result_names_machine_versions_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    result = Result([{"a": 1}], {"x": Ratio(0.5, "higher", 0.5)}, {"seconds": [0.1234567, -2e-5]})
    path = write_result("trial", {"seed": 7}, result, datetime.now(UTC), 0.25)
    text = path.read_text()
    assert '"seconds": [0.123457, -2e-05]\n' in text
    content = json.loads(text)
    assert content["options"] == {"seed": 7}
    assert content["machine"]["load_before"] == 0.25
    assert {"cores", "processor", "memory_gb"} <= content["machine"].keys()
    assert {"python", "aiohttp", "uvicorn"} <= content["versions"].keys()
    assert content["raw"] == {"seconds": [0.123457, -2e-05]}
    assert content["ratios"]["x"]["goal"] == 0.5


def test_what_cannot_be_evaluated_is_refused_before_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for option, given, why in (("--steps", "1", "1, but at least 2 are"), ("--sizes", "4,0", "0, but at least 1 are")):
        with pytest.raises(SystemExit):
            main(["feedback", option, given])
        assert f"argument {option}: {why}" in capsys.readouterr().err
    assert sizes("16,4,4") == [4, 16]


@pytest.mark.parametrize(
    ("memory", "flat"),
    [
        ([100 + (7 * sample) % 4 for sample in range(41)], True),  # noise
        ([100 + 40 * (sample == 30) for sample in range(41)], True),  # a peak of one sample
        ([min(100 + 5 * sample, 140) for sample in range(41)], True),  # it fills up before the middle
        ([100 + 12 * sample / 40 for sample in range(41)], False),  # steadily by 12 %
        ([100 + (sample if sample < 37 else 0) for sample in range(41)], False),  # it falls only at the end
        ([100 + 10 * (sample > 36) for sample in range(41)], False),  # it grows only at the end
    ],
)
def test_memory_that_grows_steadily_is_not_flat_and_noise_is(memory: list[float], flat: bool) -> None:
    assert soak.growth([float(value) for value in memory]).reached is flat


def test_a_soak_reaches_its_goals_without_restarts_failed_requests_and_problems_alone() -> None:
    now = datetime.now(UTC)
    states = [(PartState.READY, "", 0), (PartState.WAITING, "was ended by SIGKILL", 1), (PartState.READY, "", 1)]
    statuses = [PartStatus("judge", state, "", detail, now, restarts) for state, detail, restarts in states]
    restarts = soak.restarts_of(statuses)
    assert restarts == ["judge: was ended by SIGKILL"]
    assert soak.restarts_of(statuses[2:]) == []
    none: Counter[str] = Counter()
    for given, missed in (
        (soak.faults([], none, []), []),
        (soak.faults(["a lost turn"], none, []), ["turns lost, or damage found"]),
        (soak.faults([], Counter({"503 engine_unavailable": 2, "ReadTimeout": 1}), []), ["requests failed"]),
        (soak.faults([], none, restarts), ["parts restarted"]),
    ):
        assert [name for name, ratio in given.items() if not ratio.reached] == missed
    assert soak.faults([], Counter({"a": 2, "b": 1}), [])["requests failed"].value == 3.0


def test_a_process_s_memory_is_what_it_allocated() -> None:
    # A fresh process: one that has run for long may have memory of its own to give to the bytearray.
    allocate = "held = bytearray(64 * 2**20); held[::4096] = b'x' * len(held[::4096]); print(flush=True); input()"
    program = [sys.executable, "-c", allocate]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 64 < soak.allocated_mb(process.pid) < 64 + 32
        process.kill()
    assert soak.allocated_mb(2**22) == 0.0  # above the highest that Linux gives


def test_faults_are_written_with_the_reasons_of_failed_requests() -> None:
    outcome = Outcome(1, "kill judge", True, 0.1, 0.2, None, Counter({"500 internal": 2}), ["a problem"])
    written = json.loads(
        as_json([outcome], ["a lost judgement"], argparse.Namespace(runs=1, seed=3, out=Path("x")), 0.5, own_disks=True)
    )
    assert written["options"] == {"runs": 1, "seed": 3, "own_disks": True}
    assert written["machine"]["load_before"] == 0.5
    assert written["outcomes"][0]["failures"] == {"500 internal": 2}
    assert written["outcomes"][0]["problems"] == ["a problem"]
    assert written["problems_at_the_end"] == ["a lost judgement"]
    assert written["late"] == {
        "faults other than kill vllm": 1,
        "chat later than 5 s": 0,
        "next step later than 60 s": 0,
    }


def test_late_recoveries_are_counted_but_for_an_engine_that_has_to_start() -> None:
    def outcome(kind: str, chat: float, step: float | None, number: int = 1, reached: bool = True) -> Outcome:
        return Outcome(number, kind, reached, 0.1, chat, step, Counter())

    outcomes = [
        outcome("no fault", 9.0, 90.0, number=0),
        outcome("kill judge", 5.1, 60.0),
        outcome("silence engine", 5.0, 111.2),
        outcome("kill vllm", 50.0, 70.0),
        outcome("crash claimed", 99.0, 99.0, reached=False),
        outcome("cut engine", 7.0, None),
    ]
    assert list(late(outcomes).values()) == [3, 2, 1]


# OpenClaw that learns -------------------------------------------------------------------------------------------------


def ran(*calls: str, text: str = "Done.") -> openclaw_learns.Run:
    return openclaw_learns.Run("Save it.", list(calls), text, 1.0, None, 0)


@pytest.mark.parametrize(
    ("preference", "met", "missed"),
    [
        (
            Preference.ASKS,
            [ran(text="May I write it?"), ran("read", text="Is it all right?")],
            [ran("write"), ran("apply_patch", text="Fine?"), ran()],
        ),
        (
            Preference.ITSELF,
            [ran()],
            [ran("read"), ran(text=" "), ran(text='```json\n{"function": "read"}\n```')],
        ),
        (Preference.WRITES, [ran("read", "write")], [ran(), ran("read"), ran("write", text="")]),
    ],
)
def test_preferences_about_tools(
    preference: Preference, met: list[openclaw_learns.Run], missed: list[openclaw_learns.Run]
) -> None:
    assert [preference.is_met(run) for run in [*met, *missed]] == [True] * len(met) + [False] * len(missed)


@pytest.mark.parametrize("preference", Preference)
def test_openclaw_is_measured_by_requests_that_no_chat_has(preference: Preference) -> None:
    held_out, chats = (set(openclaw_learns.requests(preference, held_out=which)) for which in (True, False))
    assert len(held_out) >= 16 <= len(chats)
    assert not held_out & chats


def test_a_run_of_openclaw_goes_on_behind_the_lines_of_its_own_options(tmp_path: Path) -> None:
    lines = openclaw_learns.Lines(tmp_path / "results" / "learns.jsonl", {"model": "small", "batch": 8})
    assert lines.runs(7, "frozen", Preference.ASKS) == []
    for run in (ran("write"), ran(text="May I?")):
        lines.add(7, "frozen", Preference.ASKS, run)
    found = lines.runs(7, "frozen", Preference.ASKS)
    assert [line["run"]["calls"] for line in found] == [["write"], []]
    assert openclaw_learns.share(found) == 0.5
    other = openclaw_learns.Lines(lines.path, {"model": "small", "batch": 16})
    for none in (
        lines.runs(8, "frozen", Preference.ASKS),
        lines.runs(7, "frozen", Preference.WRITES),
        lines.runs(7, "notes", Preference.ASKS),
        other.runs(7, "frozen", Preference.ASKS),
    ):
        assert none == []
