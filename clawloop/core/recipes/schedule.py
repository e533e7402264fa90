"""Times at which a recipe lets batches be claimed: hours of the day, versions a day, and while chats are quick."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field

from clawloop.core.recipes.table import Table, Weight

# Chats of this long are looked at: long enough for a p95, short enough that training goes on soon after a busy time.
CHAT_MINUTES = 5
# Time after which the durations of chats are checked again.
_CHAT_RECHECK_SECONDS = 60.0
_DAY_MINUTES = 24 * 60
_WINDOW = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


class Schedule(Table):
    """Times at which a batch may be claimed. A step that is computed already goes on."""

    hours: str = ""
    """Hours in which batches are claimed, e.g. `01:00-06:00` or `12:00-13:30, 22:00-06:00`; empty: at any time."""
    time_zone: str = "UTC"
    """The IANA's name of the time zone of `hours` and of a day, e.g. `Europe/Berlin`."""
    versions_a_day: Annotated[int, Field(ge=0)] = 0
    """No batch is claimed once this many versions were made since midnight; 0: no limit."""
    chat_seconds: Weight = 0.0
    """No batch is claimed while replies of all policies take longer than this: p95 of the last five minutes, in seconds
    from a request to its end; 0: no limit."""


@dataclass(frozen=True, slots=True)
class Window:
    """Minutes of a day, from `begin` until before `end`; past midnight where `end` is smaller."""

    begin: int
    end: int

    @property
    def minutes(self) -> int:
        return (self.end - self.begin) % _DAY_MINUTES or _DAY_MINUTES


@dataclass(frozen=True, slots=True)
class Closed:
    """The schedule lets no batch be claimed now.

    Args:
        reason: for people; says until when, if that is known.
        seconds: time after which to check again.
    """

    reason: str
    seconds: float


def read_hours(text: str) -> list[Window]:
    """Windows such as `01:00-06:00, 22:30-24:00`, in their order.

    Raises:
        ValueError: not in that form, two of them overlap, or they leave no time out.
    """
    windows = sorted((_window(part.strip()) for part in text.split(",")), key=lambda window: window.begin)
    taken: set[int] = set()
    for window in windows:
        minutes = {(window.begin + minute) % _DAY_MINUTES for minute in range(window.minutes)}
        if taken & minutes:
            raise ValueError(f"{text!r}: two of these windows overlap: join them")
        taken |= minutes
    if len(taken) == _DAY_MINUTES:
        raise ValueError(f"{text!r} is the whole day, which has no effect: remove it")
    return windows


def read_zone(name: str) -> ZoneInfo:
    """
    Raises:
        ValueError: no time zone has this name.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{name!r} is no time zone: give one of the IANA's names, e.g. Europe/Berlin") from None


def day_begin(schedule: Schedule, now: datetime) -> datetime:
    """Begin of the schedule's present day."""
    zone = read_zone(schedule.time_zone)
    return datetime.combine(now.astimezone(zone).date(), time(), zone)


def closed_by(schedule: Schedule, now: datetime, versions_today: int, chat_p95: float | None) -> Closed | None:
    """The reason that no batch may be claimed now; None if one may.

    Args:
        now: with a time zone.
        versions_today: made since `day_begin`.
        chat_p95: seconds of replies that ended in the last CHAT_MINUTES; None if none did.
    """
    local = now.astimezone(read_zone(schedule.time_zone))
    if schedule.hours and (opens := _next_opening(read_hours(schedule.hours), local)) is not None:
        return _until(opens, now, f"outside of its hours {schedule.hours} ({schedule.time_zone})")
    if schedule.versions_a_day and versions_today >= schedule.versions_a_day:
        made = "1 version was" if versions_today == 1 else f"{versions_today} versions were"
        tomorrow = datetime.combine(local.date() + timedelta(days=1), time(), local.tzinfo)
        return _until(tomorrow, now, f"{made} made today ({schedule.time_zone}), {schedule.versions_a_day} at most")
    if schedule.chat_seconds and chat_p95 is not None and chat_p95 > schedule.chat_seconds:
        slow = f"replies take {chat_p95:.1f} s (p95 of {CHAT_MINUTES} minutes), {schedule.chat_seconds:g} s at most"
        return Closed(slow, _CHAT_RECHECK_SECONDS)
    return None


def _window(text: str) -> Window:
    found = _WINDOW.fullmatch(text)
    hours = [int(number) for number in found.groups()] if found else []
    begin, end = (hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]) if hours else (0, 0)
    if not hours or hours[1] > 59 or hours[3] > 59 or begin >= _DAY_MINUTES or end > _DAY_MINUTES:
        raise ValueError(f"{text!r} is no window: write 01:00-06:00, several with commas")
    if begin == end:
        raise ValueError(f"{text!r} begins when it ends: no batch would ever be claimed")
    return Window(begin, end)


def _next_opening(windows: list[Window], now: datetime) -> datetime | None:
    """Begin of the next window; None inside of one."""
    spans = [span for days in range(-1, 3) for span in _spans(windows, now.date() + timedelta(days=days), now)]
    if any(begin <= now < end for begin, end in spans):
        return None
    return min(begin for begin, _ in spans if begin > now)


def _spans(windows: list[Window], day: date, now: datetime) -> Iterator[tuple[datetime, datetime]]:
    midnight = datetime.combine(day, time(), now.tzinfo)
    for window in windows:
        begin = midnight + timedelta(minutes=window.begin)
        yield begin, begin + timedelta(minutes=window.minutes)


def _until(opens: datetime, now: datetime, reason: str) -> Closed:
    return Closed(f"{reason}, until {opens:%a %d %b %H:%M}", (opens - now).total_seconds())
