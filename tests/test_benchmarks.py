"""Benchmarks: what they import exists, and the loop that all of them measure with tells the truth about times."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a source distribution has no benchmarks")


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    # benchmarks set it for their own process
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    import side_by_side

    return side_by_side


class Clock:
    """Time that passes only in calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: Callable[[int], float]) -> Callable[[int], None]:
        def run(turn: int) -> None:
            self.calls.append((name, turn))
            self.now += seconds(turn)

        return run


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_what_a_benchmark_imports_exists(name: str, side_by_side: Any) -> None:
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="imported")


def test_every_call_is_timed_once_a_round_and_warming_up_does_not_count(
    side_by_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(side_by_side, "clock", clock)
    slow_at_first = {"a": clock.call("a", lambda turn: turn or 100.0), "b": clock.call("b", lambda turn: 2.0 * turn)}
    times = side_by_side.in_turn(slow_at_first, 5)
    assert times == {"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [2.0, 4.0, 6.0, 8.0, 10.0]}
    assert side_by_side.ratio(times["b"], times["a"]) == 2.0


def test_who_goes_first_changes_from_round_to_round(side_by_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(side_by_side, "clock", clock)
    side_by_side.in_turn({name: clock.call(name, lambda turn: 1.0) for name in "abc"}, 6)
    firsts = [next(name for name, turn in clock.calls if turn == wanted) for wanted in range(1, 7)]
    assert sorted(firsts) == ["a", "a", "b", "b", "c", "c"]


def test_a_ratio_is_taken_within_a_round(side_by_side: Any) -> None:
    # the machine was three times slower in one round: both sides were, and the ratio says nothing of it
    assert side_by_side.ratio([2.0, 6.0, 2.0], [1.0, 3.0, 1.0]) == 2.0


def test_short_calls_are_repeated_and_one_of_them_counts(side_by_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(side_by_side, "clock", clock)
    times = side_by_side.in_turn({"short": clock.call("short", lambda turn: 0.25)}, 5, least=1.0)
    assert times == {"short": [0.25] * 5}
    assert [turn for _, turn in clock.calls].count(3) == 4


def test_fewer_than_five_rounds_are_refused(side_by_side: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parser("").parse_args(["--rounds", "4"])
    assert "at least 5 rounds" in capsys.readouterr().err
