"""When a recipe lets batches be claimed."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from clawloop.core.errors import RecipeRejected
from clawloop.core.recipes.recipe import Schedule, read_recipe
from clawloop.core.recipes.schedule import Closed, closed_by, day_begin

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = Schedule(hours="01:00-06:00", time_zone="Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(UTC)


@pytest.mark.parametrize(
    ("hours", "now", "opens"),
    [
        ("01:00-06:00", "2026-11-23T00:59", "Mon 23 Nov 01:00"),
        ("01:00-06:00", "2026-11-23T01:00", None),
        ("01:00-06:00", "2026-11-23T05:59", None),
        ("01:00-06:00", "2026-11-23T06:00", "Tue 24 Nov 01:00"),
        ("22:00-06:00", "2026-11-23T03:00", None),
        ("22:00-06:00", "2026-11-23T21:00", "Mon 23 Nov 22:00"),
        ("22:00-24:00", "2026-11-23T23:59", None),
        ("12:00-13:30, 22:00-06:00", "2026-11-23T14:00", "Mon 23 Nov 22:00"),
        ("12:00-13:30,22:00-06:00", "2026-11-23T13:29", None),
        ("01:00-06:00", "2026-03-29T06:30", "Mon 30 Mar 01:00"),  # the day of the change to summer time
    ],
)
def test_hours(hours: str, now: str, opens: str | None) -> None:
    schedule = Schedule(hours=hours, time_zone="Europe/Berlin")
    closed = closed_by(schedule, at(now), 0, None)
    if opens is None:
        assert closed is None
    else:
        assert closed is not None
        assert closed.reason == f"outside of its hours {hours} (Europe/Berlin), until {opens}"


def test_the_seconds_until_it_opens_are_real_seconds() -> None:
    assert closed_by(NIGHT, at("2026-11-23T00:30"), 0, None) == Closed(
        "outside of its hours 01:00-06:00 (Europe/Berlin), until Mon 23 Nov 01:00", 1800.0
    )
    # The clock is put back in the night: an hour more.
    closed = closed_by(NIGHT, at("2026-10-24T06:00"), 0, None)
    assert closed is not None
    assert closed.seconds == 19 * 3600
    closed = closed_by(Schedule(hours="04:00-06:00", time_zone="Europe/Berlin"), at("2026-10-24T06:00"), 0, None)
    assert closed is not None
    assert closed.seconds == 23 * 3600


def test_versions_of_a_day() -> None:
    daily = Schedule(versions_a_day=2, time_zone="Europe/Berlin")
    now = at("2026-11-23T22:00")
    assert day_begin(daily, now) == at("2026-11-23T00:00")
    assert closed_by(daily, now, 1, None) is None
    assert closed_by(daily, now, 2, None) == Closed(
        "2 versions were made today (Europe/Berlin), 2 at most, until Tue 24 Nov 00:00", 7200.0
    )


def test_slow_chats() -> None:
    quick = Schedule(chat_seconds=2)
    now = at("2026-11-23T22:00")
    assert closed_by(quick, now, 0, None) is None
    assert closed_by(quick, now, 0, 2.0) is None
    assert closed_by(quick, now, 0, 4.25) == Closed("replies take 4.2 s (p95 of 5 minutes), 2 s at most", 60.0)


@pytest.mark.parametrize(
    ("keys", "field", "problem"),
    [
        ('hours = "1 to 6 am"', "hours", "'1 to 6 am' is no window: write 01:00-06:00"),
        ('hours = "01:00-25:00"', "hours", "is no window"),
        ('hours = "01:60-02:00"', "hours", "is no window"),
        ('hours = "24:00-02:00"', "hours", "is no window"),
        ('hours = "06:00-06:00"', "hours", "no batch would ever be claimed"),
        ('hours = "01:00-06:00, 05:00-07:00"', "hours", "overlap: join them"),
        ('hours = "22:00-06:00, 05:00-07:00"', "hours", "overlap: join them"),
        ('hours = "00:00-24:00"', "hours", "is the whole day, which has no effect"),
        ('hours = "00:00-12:00, 12:00-24:00"', "hours", "is the whole day"),
        ('hours = "01:00-06:00"\ntime_zone = "Berlin"', "time_zone", "'Berlin' is no time zone"),
        ('hours = "01:00-06:00"\ntime_zone = "../etc/passwd"', "time_zone", "is no time zone"),
        ('hours = "01:00-06:00"\ntime_zone = ""', "time_zone", "is no time zone"),
        ('time_zone = "Europe/Berlin"\nchat_seconds = 2.0', "time_zone", "has no effect without"),
        ("versions_a_day = -1", "versions_a_day", "greater than or equal to 0"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: str, field: str, problem: str) -> None:
    with pytest.raises(RecipeRejected, match=problem) as raised:
        read_recipe(f'name = "x"\n[train.schedule]\n{keys}')
    assert raised.value.field == f"train.schedule.{field}"


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(RecipeRejected, match="has no effect: set hours") as raised:
        read_recipe('name = "x"\n[train.schedule]')
    assert raised.value.field == "train.schedule"
