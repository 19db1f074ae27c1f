"""Where the time of a call goes: samples of the stack while it is called again and again, as a flame graph and as a table.

A timer interrupts the process and notes which lines are being run. Unlike a profiler that is told of every call, this takes no longer for
functions that call many others. Time spent in C counts for the line of Python that called it.
"""

from __future__ import annotations

import html
import linecache
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

EVERY_S = 2e-4
WIDTH, HEIGHT = 1200, 18


@dataclass
class Frame:
    """A function, or a line, as reached by one path of calls.

    Attributes:
        samples: how often it was being run.
        is_line: a line of the function above, while it called nothing in Python.
    """

    name: str
    is_line: bool = False
    samples: int = 0
    below: dict[str, Frame] = field(default_factory=dict)

    def child(self, name: str, is_line: bool = False) -> Frame:
        return self.below.setdefault(name, Frame(name, is_line))


@dataclass(frozen=True)
class Profile:
    """What was seen of a call.

    Attributes:
        us: of one call, measured while sampling.
    """

    root: Frame
    us: float

    def us_of(self, frame: Frame) -> float:
        return self.us * frame.samples / max(self.root.samples, 1)


def sampled(call: Callable[[], object], seconds: float, wait: Callable[[], object], turn: int = 100) -> Profile:
    """Samples of `call`, made for so long.

    Args:
        wait: run between turns of `turn` calls each, and not counted: lets a GPU finish.
    """
    root, spent, calls = Frame("call"), 0.0, 0
    here = sys._getframe()
    counts = False

    def seen(_: int, frame: FrameType | None) -> None:
        nonlocal counts
        if counts:
            counts = False  # not the time of this
            _add(root, frame, here)
            counts = True

    before = signal.signal(signal.SIGALRM, seen)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        while spent < seconds:
            wait()
            start, counts = time.perf_counter(), True
            for _ in range(turn):
                call()
            counts = False
            spent, calls = spent + time.perf_counter() - start, calls + turn
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    return Profile(root, spent / calls * 1e6)


def _add(root: Frame, frame: FrameType | None, outermost: FrameType) -> None:
    """Count a sample: the functions from the outermost, without it, to the innermost, then its line."""
    path = []
    line = None if frame is None or frame is outermost else _line_of(frame)
    while frame is not None and frame is not outermost:
        path.append(_name_of(frame.f_code))
        frame = frame.f_back
    if frame is None or line is None:
        return  # another thread, or between two calls
    root.samples += 1
    node = root
    for name in reversed(path):
        node = node.child(name)
        node.samples += 1
    node.child(line, is_line=True).samples += 1


@cache
def _name_of(code: CodeType) -> str:
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return f"{name.rpartition('<locals>.')[2]} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _line_of(frame: FrameType) -> str:
    number = frame.f_lineno or frame.f_code.co_firstlineno  # of what the interpreter does by itself there is none
    text = linecache.getline(frame.f_code.co_filename, number).strip()
    return f"{number}: {text}" if text else f"line {number}"


def rectangles(frame: Frame, left: int, depth: int, least: float) -> Iterator[tuple[int, int, Frame]]:
    """(samples to the left, depth, frame) of each frame that is wide enough to see."""
    yield left, depth, frame
    for child in sorted(frame.below.values(), key=lambda f: -f.samples):
        if child.samples >= least:
            yield from rectangles(child, left, depth + 1, least)
        left += child.samples


def picture(profile: Profile, title: str) -> str:
    """SVG: the call at the top, below each function what it runs; the width of a box is its share of the time. Lines are pale."""
    root = profile.root
    boxes = list(rectangles(root, 0, 0, root.samples / 400))
    rows = 1 + max(depth for _, depth, _ in boxes)
    scale = WIDTH / max(root.samples, 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{(rows + 2) * HEIGHT}" font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{(rows + 2) * HEIGHT}" fill="white"/>',
        f'<text x="4" y="14">{html.escape(title)}</text>',
    ]
    for left, depth, frame in boxes:
        x, wide, y = left * scale, frame.samples * scale, (depth + 1.2) * HEIGHT
        colour = "#f3efe6" if frame.is_line else "#9fc5e8" if depth else "#d9d9d9"
        us = profile.us_of(frame)
        words = f"{us:.1f} µs {frame.name}"
        room = int(wide / 6.7) - 1
        label = words[:room] if room >= 4 else ""
        parts.append(
            f"<g><title>{html.escape(f'{frame.name}: {us:.2f} µs, {frame.samples / max(root.samples, 1):.1%}')}</title>"
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide - 0.5, 0.5):.1f}" height="{HEIGHT - 1}" fill="{colour}"/>'
            f'<text x="{x + 2:.1f}" y="{y + 13:.1f}">{html.escape(label)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def table(profile: Profile, title: str, most: int = 40) -> str:
    """The lines that take the most time, one a row: µs of a call, share, function, line."""
    own: Counter[tuple[str, str]] = Counter()

    def walk(frame: Frame, above: str) -> None:
        for child in frame.below.values():
            if child.is_line:
                own[above, child.name] += child.samples
            else:
                walk(child, child.name)

    walk(profile.root, "")
    rows: list[Any] = [f"{title}: {profile.us:.1f} µs a call, {profile.root.samples} samples"]
    for (function, line), samples in own.most_common(most):
        share = samples / max(profile.root.samples, 1)
        rows.append(f"{profile.us * share:8.2f} µs{share:8.1%}  {function:54} {line}")
    return "\n".join(rows) + "\n"


def write(call: Callable[[], object], folder: Path, name: str, title: str, seconds: float, wait: Callable[[], object]) -> tuple[Path, Path]:
    """Write NAME.svg and NAME.txt into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = sampled(call, seconds, wait)
    drawn, listed = folder / f"{name}.svg", folder / f"{name}.txt"
    drawn.write_text(picture(profile, f"{name}, {title}: {profile.us:.1f} µs a call"), encoding="utf-8")
    listed.write_text(table(profile, f"{name}, {title}"), encoding="utf-8")
    return drawn, listed
