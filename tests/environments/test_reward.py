"""The reward in what a verifier left: one number, or named ones."""

from __future__ import annotations

import io
import tarfile

import pytest

from clawloop.core.contracts.episodes import RewardRange
from clawloop.environments.playing import packed, read_reward

DECLARE = "declare it"


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ({"reward.txt": " 0.5\n"}, 0.5),
        ({"reward.json": '{"reward": 0.5}'}, 0.5),
        ({"reward.json": '{"tests": 0.25, "reward": 1, "fast": false}'}, 1.0),
        ({"reward.json": '{"correctness": 0.75}'}, 0.75),
        ({"reward.json": '{"reward": 1}', "reward.txt": "1"}, 1.0),
        # One of them is rounded.
        ({"reward.json": '{"reward": 0.8427312}', "reward.txt": "0.843"}, 0.8427312),
    ],
)
def test_one_reward_is_found(written: dict[str, str], reward: float) -> None:
    left = packed({name: text.encode() for name, text in written.items()})
    assert read_reward(left, RewardRange(), DECLARE) == (reward, "")


TWO = "the verifier wrote two rewards: "


NUMBERS = "the verifier's reward.json does not hold an object of numbers"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"reward.txt": "1 0"}, "the verifier's reward.txt does not hold one number"),
        ({"reward.txt": "1" * 200}, "the verifier's reward.txt does not hold one number"),
        ({"reward.txt": "nan"}, "the verifier's reward is not finite"),
        ({"reward.txt": "-0.5"}, "the verifier's reward -0.5 is not between 0 and 1: declare it"),
        ({"reward.json": '{"reward": 1}', "reward.txt": "0"}, f"{TWO}1 and 0"),
        ({"reward.json": '{"reward": 1, "reward": 0}'}, f"{TWO}1 and 0"),
        ({"reward.json": '{"tests": 3}', "reward.txt": "0.25"}, f"{TWO}3 and 0.25"),
        ({"reward.json": '{"style": 1, "tests": 0}'}, "the verifier's reward.json names 2 rewards, and none `reward`"),
        ({"reward.json": "{}"}, "the verifier's reward.json names 0 rewards, and none `reward`"),
        ({"reward.json": '{"reward": "1"}'}, NUMBERS),
        ({"reward.json": '{"reward": 1, "why": "words"}'}, NUMBERS),
        ({"reward.json": '{"reward": 1, "tests": {"one": 1}}'}, NUMBERS),
        ({"reward.json": "null"}, NUMBERS),
        ({"reward.json": '{"reward": NaN}'}, "the verifier's reward is not finite"),
        ({"reward.json": f'{{"reward": 1{"0" * 400}}}'}, "the verifier's reward is not finite"),
        ({"reward.json": '{"reward": 2e6}'}, "the verifier's reward 2e+06 is not between 0 and 1: declare it"),
        ({"reward.json": "0.5"}, NUMBERS),
        ({"reward.json": '[["reward", 1]]'}, NUMBERS),
        ({"reward.json": ""}, "the verifier's reward.json is not JSON"),
        ({"reward.json": "[" * 60_000}, "the verifier's reward.json is not JSON"),
        ({"reward.json": "\N{LATIN SMALL LETTER E WITH ACUTE}"}, "the verifier's reward.json is not JSON"),
        # A broken report is no reason to believe the other file.
        ({"reward.json": "{", "reward.txt": "1"}, "the verifier's reward.json is not JSON"),
        (
            {"reward.json": f'{{"reward": 1, "log": "{"x" * 70_000}"}}'},
            "the verifier's reward.json has more than 65536 bytes",
        ),
    ],
)
def test_anything_else_is_no_reward_with_a_reason(written: dict[str, str], why: str) -> None:
    left = packed({name: text.encode("latin-1") for name, text in written.items()})
    assert read_reward(left, RewardRange(), DECLARE) == (None, why)


def test_a_reward_is_the_share_of_the_declared_range() -> None:
    assert read_reward(packed({"reward.txt": b"3"}), RewardRange(-1, 4), DECLARE) == (0.8, "")
    assert read_reward(packed({"reward.txt": b"5"}), RewardRange(-1, 4), DECLARE) == (
        None,
        "the verifier's reward 5 is not between -1 and 4: declare it",
    )


def test_no_file_is_the_callers_matter() -> None:
    folder = io.BytesIO()
    with tarfile.open(fileobj=folder, mode="w") as archive:
        info = tarfile.TarInfo("reward.json")
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    for left in (packed({}), folder.getvalue()):
        with pytest.raises(KeyError):
            read_reward(left, RewardRange(), DECLARE)
    with pytest.raises(tarfile.TarError):
        read_reward(b"no archive", RewardRange(), DECLARE)
