"""Cases of a benchmark prepared side by side, each in a process of its own, and measured one at a time.

Most of a short measurement is imports and compilation, which need cores and not the GPU. A process that is `waiting` says so when all is
compiled, and goes on when it is told to.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

READY = "ready to be measured"


def wait_for_turn() -> None:
    """In a child: everything is prepared; goes on when the parent says so, and ends with it."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody waits for what would be measured")


class Turn:
    """A child process and what it prints."""

    def __init__(self, command: Sequence[str]):
        self.command = command
        self.lines: list[str] = []
        self.is_ready, self.is_over = threading.Event(), threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                if line.strip() == READY:
                    self.is_ready.set()
                else:
                    self.lines.append(line.rstrip())
        self.is_ready.set()
        self.is_over.set()

    def begin(self) -> None:
        """Its turn to be measured."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended before; what it printed says why

    def end(self) -> None:
        """Stops it if it still runs."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def in_turns(script: Path, cases: Sequence[Sequence[str]], prepare_s: float, measure_s: float, report: Callable[[str], None]) -> None:
    """Run `script` once for each case's arguments: all prepare at once, then each has its turn.

    Args:
        prepare_s: a process that is not ready by then, counted from the start of all, is stopped and named.
        measure_s: so is one whose turn takes longer.
        report: gets every line that a process prints during its turn, and before.
    """
    started = time.monotonic()
    turns = [Turn([str(script), *case]) for case in cases]
    for turn in turns:
        if not turn.is_ready.wait(max(0.0, prepare_s - (time.monotonic() - started))):
            turn.process.kill()
            report(f"{' '.join(turn.command[1:])}: not ready after {prepare_s:g} s")
    for turn in turns:
        if turn.process.poll() is None:
            turn.begin()
            if not turn.is_over.wait(measure_s):
                report(f"{' '.join(turn.command[1:])}: not measured within {measure_s:g} s")
        turn.end()
        for line in turn.lines:
            report(line)
