"""The report as one HTML file that needs nothing else: latency, its distribution and memory, drawn as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from gc_sidecar.sweep.analysis import NOT_GC, Measurement, Outlier, PolicyResult
from gc_sidecar.sweep.journal import Pause
from gc_sidecar.sweep.reporting import ladder_text, show
from gc_sidecar_agent.commands.output import seconds, size

WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 12, 34
COLUMNS = WIDTH - LEFT - RIGHT
COLOURS = {"off": "#b3261e", "freeze": "#1f6feb", "budget": "#1a7f37"}
# Pauses shorter than this are too many to mark.
MARKED_PAUSE_S = 0.002

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #6e7781; --line: #d0d7de; --back: #fff }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e6edf3; --faint: #8b949e; --line: #30363d; --back: #0d1117 }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back) }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow-x: auto; font-size: 13px } svg { width: 100%; height: auto } figure { margin: 1.5rem 0 }
text { fill: var(--ink); font-size: 12px } .grid { stroke: var(--line) }
figcaption { color: var(--faint) } .faint { fill: var(--faint) }
"""


def write(results: Sequence[PolicyResult], about: dict[str, object]) -> str:
    """The whole page."""
    told = "".join(
        f"<tr><th scope=row>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in about.items()
    )
    figures = "".join(_latency_figure(result) for result in results)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gc-sidecar sweep</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>
<h1>Latency under each GC policy</h1>
<pre>{_text(show(results))}</pre>
<h2>Every measurement, and the pauses of GC</h2>{figures}
<h2>Distribution</h2>{_distribution_figure(results)}
<h2>Memory</h2>{_memory_figure(results)}
<h2>About this sweep</h2><table>{told}</table>
</body></html>
"""


def _text(value: object) -> str:
    return html.escape(str(value))


class _Scale:
    """From values to pixels, straight or by their logarithm."""

    def __init__(
        self, low: float, high: float, begin: float, end: float, log: bool = False
    ) -> None:
        self._log = log
        self._low, self._high = self._of(low), self._of(high)
        self._begin, self._end = begin, end

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-9)) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._low) / ((self._high - self._low) or 1.0)
        return round(self._begin + share * (self._end - self._begin), 1)


def _svg(content: Iterable[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(label)}">{"".join(content)}</svg>'


def _figure(content: Iterable[str], caption: str) -> str:
    return f"<figure>{_svg(content, caption)}<figcaption>{_text(caption)}</figcaption></figure>"


def _decades(low: float, high: float) -> list[float]:
    return [
        10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ]


def _time_axis(low_s: float, high_s: float) -> tuple[_Scale, list[str]]:
    ticks = _decades(max(low_s, 1e-5), max(high_s, 1e-4))
    scale = _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, log=True)
    return scale, [
        f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={scale(tick)} y2={scale(tick)} />"
        f"<text x={LEFT - 6} y={scale(tick) + 4} text-anchor=end>{seconds(tick)}</text>"
        for tick in ticks
    ]


def _latency_figure(result: PolicyResult) -> str:
    measurements = result.measurements
    if not measurements:
        return ""
    colour = COLOURS[result.policy]
    x = _Scale(0, len(measurements), LEFT, WIDTH - RIGHT)
    long = [pause for pause in result.pauses if pause.duration_s >= MARKED_PAUSE_S]
    lengths = [each.duration_s for each in measurements]
    y, content = _time_axis(min(lengths), max(lengths + [pause.duration_s for pause in long]))
    content += _envelope(measurements, x, y, colour)
    content += [_outlier_mark(outlier, x, y, colour) for outlier in result.outliers]
    content += _pause_marks(long, measurements, x, y)
    content.append(
        f"<text class=faint x={WIDTH - RIGHT} y={HEIGHT - 8} text-anchor=end>measurement</text>"
    )
    caption = (
        f"{result.policy}: the longest and the median token of each stretch; circles are outliers"
        f" ({result.gc_outliers} by GC, {result.causes[NOT_GC]} not), triangles are automatic pauses of GC"
    )
    if result.ladder is not None and result.ladder.is_one:
        caption += f"; {ladder_text(result.ladder)}"
    return _figure(content, caption)


def _outlier_mark(outlier: Outlier, x: _Scale, y: _Scale, colour: str) -> str:
    each = outlier.measurement
    what = f"{seconds(each.duration_s)} at {each.point}: {outlier.cause}"
    at = f"cx={x(each.index)} cy={y(each.duration_s)}"
    return f'<circle {at} r=3 fill="none" stroke="{colour}"><title>{_text(what)}</title></circle>'


def _envelope(measurements: Sequence[Measurement], x: _Scale, y: _Scale, colour: str) -> list[str]:
    """The longest and the median measurement in each column of pixels."""
    per_column = max(1, math.ceil(len(measurements) / COLUMNS))
    longest, median = [], []
    for first in range(0, len(measurements), per_column):
        column = sorted(each.duration_s for each in measurements[first : first + per_column])
        longest.append(f"{x(first)},{y(column[-1])}")
        median.append(f"{x(first)},{y(column[len(column) // 2])}")
    return [
        f'<polyline points="{" ".join(longest)}" fill="none" stroke="{colour}" stroke-opacity=".35" />',
        f'<polyline points="{" ".join(median)}" fill="none" stroke="{colour}" />',
    ]


def _pause_marks(
    pauses: Iterable[Pause], measurements: Sequence[Measurement], x: _Scale, y: _Scale
) -> list[str]:
    marks, index = [], 0
    for pause in sorted(pauses, key=lambda each: each.started_s):
        while (
            index + 1 < len(measurements) and measurements[index + 1].started_s <= pause.started_s
        ):
            index += 1
        left, top = x(index), y(pause.duration_s)
        what = f"{pause.process}: gen{pause.gc_generation}, {seconds(pause.duration_s)}"
        marks.append(
            f'<path d="M{left - 4},{top - 7}h8l-4,7z" fill="currentColor"><title>{_text(what)}</title></path>'
        )
    return marks


def _distribution_figure(results: Sequence[PolicyResult]) -> str:
    """For each length, the share of measurements that took longer: both by their logarithms."""
    durations = {r.policy: sorted(each.duration_s for each in r.measurements) for r in results}
    everything = [value for values in durations.values() for value in (values[:1] + values[-1:])]
    if not everything:
        return ""
    x = _Scale(min(everything), max(everything), LEFT, WIDTH - RIGHT, log=True)
    least = 1 / max(len(values) for values in durations.values())
    y = _Scale(1.0, least, TOP, HEIGHT - BOTTOM, log=True)
    content = [
        f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y(tick)} y2={y(tick)} />"
        f"<text x={LEFT - 6} y={y(tick) + 4} text-anchor=end>{100 * tick:g} %</text>"
        for tick in _decades(least, 1.0)
        if least <= tick <= 1.0
    ]
    content += [
        f"<text x={x(tick)} y={HEIGHT - 16} text-anchor=middle>{seconds(tick)}</text>"
        for tick in _decades(min(everything), max(everything))
        if min(everything) <= tick <= max(everything)
    ]
    for number, (policy, values) in enumerate(durations.items()):
        step = max(1, len(values) // 2000)
        places = [
            *range(0, max(0, len(values) - 200), step),
            *range(max(0, len(values) - 200), len(values)),
        ]
        points = " ".join(f"{x(values[i])},{y((len(values) - i) / len(values))}" for i in places)
        content.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width=1.5 />'
        )
        content.append(
            f"<text x={WIDTH - RIGHT - 4} y={TOP + 14 + 16 * number} text-anchor=end"
            f' style="fill:{COLOURS[policy]}">{policy}</text>'
        )
    return _figure(
        content, "The share of measurements that took longer than a time, for each policy"
    )


def _memory_figure(results: Sequence[PolicyResult]) -> str:
    """How memory grew inside each policy's blocks, one after the other."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        elapsed_s = grown = 0.0
        line = lines.setdefault(result.policy, [(0.0, 0.0)])
        for block in result.memory:
            begin = block[0]
            line += [
                (
                    elapsed_s + each.read_s - begin.read_s,
                    grown + each.anonymous_bytes - begin.anonymous_bytes,
                )
                for each in block
            ]
            elapsed_s, grown = line[-1]
    values = [value for line in lines.values() for _, value in line]
    longest_s = max(time_s for line in lines.values() for time_s, _ in line)
    x = _Scale(0, longest_s, LEFT, WIDTH - RIGHT)
    y = _Scale(min(values), max(values), HEIGHT - BOTTOM, TOP)
    content = [
        f"<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y(tick)} y2={y(tick)} />"
        f"<text x={LEFT - 6} y={y(tick) + 4} text-anchor=end>{size(tick)}</text>"
        for tick in sorted({min(values), 0.0, max(values)})
    ]
    for number, (policy, line) in enumerate(lines.items()):
        points = " ".join(f"{x(time_s)},{y(value)}" for time_s, value in line)
        content.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[policy]}" stroke-width=1.5 />'
        )
        content.append(
            f'<text x={LEFT + 8} y={TOP + 14 + 16 * number} style="fill:{COLOURS[policy]}">{policy}</text>'
        )
    content.append(
        f"<text class=faint x={WIDTH - RIGHT} y={HEIGHT - 8} text-anchor=end>{seconds(longest_s)}</text>"
    )
    return _figure(
        content, "Growth of the engine's anonymous memory inside the blocks of each policy"
    )
