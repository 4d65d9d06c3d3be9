"""What is shown of a run, on a terminal and elsewhere."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import pytest
from rich.console import Console

from lightrft.rlvr.progress import clock_time, open_progress


def clock() -> Iterator[float]:
    """Ten seconds pass between one look and the next."""
    seconds = 0.0
    while True:
        yield seconds
        seconds += 10.0


def run(quiet: bool = False, terminal: bool | None = None, start: int = 0, total: int = 3) -> str:
    """All that a run shows."""
    out = io.StringIO()
    ticks = clock()
    console = Console(file=out, force_terminal=bool(terminal), width=120)
    with open_progress(total, quiet, terminal, console, start=start, clock=lambda: next(ticks)) as show:
        show(start, {"accuracy": 0.0})
        for step in range(start + 1, total + 1):
            show(step, {"reward": step / 4, "loss": math.nan, "grad_norm": 1.5, "kl": 0.01, "tokens_per_second": 321.4})
        show(total, {"accuracy": 0.625})
    return out.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = run().splitlines()
    assert lines[0] == "training: 3 steps"
    assert lines[1] == "step 0/3  held-out accuracy 0.0%"
    assert lines[2].startswith("step 1/3  reward 0.250  loss nan  gradient norm 1.500  KL 0.0100  tokens/s 321  left ")
    assert lines[-2] == "step 3/3  held-out accuracy 62.5%"
    assert lines[-1] == "done: step 3/3  reward 0.750  held-out accuracy 62.5%  in 1:00"
    assert len(lines) == 7
    assert not any("\x1b" in line for line in lines)


def test_time_left_is_that_of_the_steps_made_here() -> None:
    # Looks at the clock: start 0, step 10 at 10, step 11 at 20 -> 20 s for one step, 2 to go.
    line = next(line for line in run(start=10, total=13).splitlines() if line.startswith("step 11/13"))
    assert line.endswith("left 0:40")


def test_quiet_is_two_lines() -> None:
    assert [line.split(":")[0] for line in run(quiet=True).splitlines()] == ["training", "done"]
    assert "\x1b" not in run(quiet=True, terminal=True).replace("\x1b[0m", "")


def test_a_terminal_gets_a_live_display() -> None:
    text = run(terminal=True)
    for part in ("3/3", "gradient norm", "321", "held-out accuracy", "62.5%", "time left", "\x1b"):
        assert part in text
    assert "step 1/3  reward" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_that_is_stopped_says_how_far_it_came(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)

    def stopped() -> None:
        with open_progress(5, False, terminal, console) as show:
            show(2, {"reward": 0.5})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert "stopped: step 2/5  reward 0.500  in 0:00" in out.getvalue().splitlines()[-1]


def test_a_resumed_run_says_so() -> None:
    assert run(start=2).splitlines()[0] == "training: 3 steps, going on after step 2"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3700, "1:01:40"), (-1, "0:00")])
def test_clock_time(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
