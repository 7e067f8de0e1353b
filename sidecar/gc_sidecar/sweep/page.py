"""The report as one HTML file that needs nothing else: latency, its distribution and memory, drawn as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from gc_sidecar.sweep.analysis import CLIENT, NOT_GC, Measurement, Outlier, PolicyResult
from gc_sidecar.sweep.journal import Pause
from gc_sidecar.sweep.plan import POINT_FIELDS, Point
from gc_sidecar.sweep.reporting import explanation, ladder_text, overview
from gc_sidecar_agent.commands.output import UNKNOWN, seconds, size

WIDTH, HEIGHT = 960, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 12, 34
END_X, END_Y = WIDTH - RIGHT, HEIGHT - BOTTOM
COLUMNS = END_X - LEFT
COLOURS = {"off": "#b3261e", "freeze": "#1f6feb", "budget": "#1a7f37"}
# Pauses shorter than this are too many to mark.
MARKED_PAUSE_S = 0.002
# Of a distribution all of the longest measurements are drawn, and of the others so many.
DRAWN, DRAWN_OF_THE_LONGEST = 2_000, 200

PLOT_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #57606a } .grid { stroke: #d0d7de } .mark { fill: #57606a }
@media (prefers-color-scheme: dark) {
 text { fill: #8b949e } .grid { stroke: #30363d } .mark { fill: #c9d1d9 }
}
"""
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow-x: auto; font-size: 13px } .notes { white-space: pre-wrap }
svg { width: 100%; height: auto } figure { margin: 1.5rem 0 }
"""


def write(results: Sequence[PolicyResult], about: dict[str, object]) -> str:
    """The whole page."""
    figures = "".join(_figure(svg, caption) for svg, caption in plots(results))
    rows = "".join(
        f"<tr>{_tag('th', {'scope': 'row'}, _text(name))}{_tag('td', {}, _text(_value(value)))}</tr>"
        for name, value in _flat(about).items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gc-sidecar sweep</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>
<h1>Latency under each GC policy</h1>
<pre>{_text(overview(results))}</pre>
<pre class="notes">{_text(explanation(results))}</pre>
{figures}
<h2>About this sweep</h2><table>{rows}</table>
</body></html>
"""


def plots(results: Sequence[PolicyResult]) -> list[tuple[str, str]]:
    """Every plot as an SVG that can stand alone, with its caption."""
    results = [result for result in results if result.measurements]
    if not results:
        return []
    ticks = _latency_ticks(results)
    found = [_latency_plot(result, ticks) for result in results]
    return [*found, _distribution_plot(results), _memory_plot(results)]


def _text(value: object) -> str:
    return html.escape(str(value))


def _flat(about: Mapping[str, object]) -> dict[str, object]:
    """The plan's fields beside the others."""
    plan = about.get("plan")
    rest = {name: value for name, value in about.items() if name != "plan"}
    return {**rest, **plan} if isinstance(plan, dict) else rest


def _value(value: object) -> object:
    """A list in a line: of a point its three numbers, as in the table. A dash where there is nothing."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict) and set(value) == set(POINT_FIELDS):
        return str(Point(**value))
    if isinstance(value, (list, tuple)):
        return ", ".join(str(_value(each)) for each in value)
    return value


def _tag(name: str, attributes: dict[str, object], content: str = "") -> str:
    told = "".join(f' {key}="{_text(value)}"' for key, value in attributes.items())
    return f"<{name}{told}>{content}</{name}>"


def _figure(svg: str, caption: str) -> str:
    return _tag("figure", {}, svg + _tag("figcaption", {}, _text(caption)))


def _svg(content: Iterable[str], label: str) -> str:
    attributes: dict[str, object] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "viewBox": f"0 0 {WIDTH} {HEIGHT}",
        "role": "img",
        "aria-label": label,
    }
    return _tag("svg", attributes, _tag("style", {}, PLOT_STYLE) + "".join(content))


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


def _decades(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [10.0**power for power in powers]


def _row(y: float, label: str) -> str:
    """A line across the plot, with its value."""
    line = _tag("line", {"class": "grid", "x1": LEFT, "x2": END_X, "y1": y, "y2": y})
    return line + _tag("text", {"x": LEFT - 6, "y": y + 4, "text-anchor": "end"}, _text(label))


def _line(points: Iterable[tuple[float, float]], colour: str, opacity: float = 1.0) -> str:
    joined = " ".join(f"{x},{y}" for x, y in points)
    return _tag(
        "polyline",
        {"points": joined, "fill": "none", "stroke": colour, "stroke-opacity": opacity},
    )


def _legend(policies: Iterable[str], x: float, anchor: str) -> list[str]:
    return [
        _tag(
            "text",
            {"x": x, "y": TOP + 14 + 16 * number, "text-anchor": anchor, "style": f"fill:{COLOURS[policy]}"},
            policy,
        )
        for number, policy in enumerate(policies)
    ]  # fmt: skip


def _under(x: float, label: str) -> str:
    """What a place on the axis stands for."""
    return _tag("text", {"x": x, "y": HEIGHT - 18, "text-anchor": "middle"}, _text(label))


def _even_ticks(count: int) -> range:
    """Some four places among so many, at round numbers."""
    step = 10 ** max(0, len(str(count)) - 1)
    while count / step < 3 and step % 2 == 0:
        step //= 2
    return range(0, count, step)


def _below(label: str) -> str:
    return _tag("text", {"x": END_X, "y": HEIGHT - 4, "text-anchor": "end"}, _text(label))


def _latency_ticks(results: Sequence[PolicyResult]) -> list[float]:
    """The same for all policies, so that their plots can be held against each other."""
    lengths = [each.duration_s for result in results for each in result.measurements]
    pauses = [pause.duration_s for result in results for pause in result.pauses]
    return _decades(max(min(lengths), 1e-5), max(lengths + pauses))


def _latency_plot(result: PolicyResult, ticks: Sequence[float]) -> tuple[str, str]:
    measurements, colour = result.measurements, COLOURS[result.policy]
    x = _Scale(0, len(measurements), LEFT, END_X)
    marked = [pause for pause in result.pauses if pause.duration_s >= MARKED_PAUSE_S]
    y = _Scale(ticks[0], ticks[-1], END_Y, TOP, log=True)
    caption = (
        f"{result.policy}: the longest and the median token of each stretch; circles are outliers"
        f" ({result.gc_outliers} by GC, {result.causes[CLIENT]} by this client's own, {result.causes[NOT_GC]} by"
        f" something else), triangles are automatic pauses of GC from {seconds(MARKED_PAUSE_S)} on"
    )
    if result.ladder is not None and result.ladder.is_one:
        caption += f"; {ladder_text(result.ladder)}"
    content = [_row(y(tick), seconds(tick)) for tick in ticks]
    content += [_under(x(at), f"{at:,}") for at in _even_ticks(len(measurements))]
    content += _envelope(measurements, x, y, colour)
    content += [_outlier_mark(outlier, x, y, colour) for outlier in result.outliers]
    content += _pause_marks(marked, measurements, x, y)
    return _svg([*content, _below("measurement")], caption), caption


def _envelope(measurements: Sequence[Measurement], x: _Scale, y: _Scale, colour: str) -> list[str]:
    """The longest and the median measurement in each column of pixels."""
    per_column = max(1, math.ceil(len(measurements) / COLUMNS))
    longest, median = [], []
    for first in range(0, len(measurements), per_column):
        column = sorted(each.duration_s for each in measurements[first : first + per_column])
        longest.append((x(first), y(column[-1])))
        median.append((x(first), y(column[len(column) // 2])))
    return [_line(longest, colour, 0.35), _line(median, colour)]


def _outlier_mark(outlier: Outlier, x: _Scale, y: _Scale, colour: str) -> str:
    each = outlier.measurement
    what = f"{seconds(each.duration_s)} at {each.point}: {outlier.cause}"
    at = {"cx": x(each.index), "cy": y(each.duration_s), "r": 3, "fill": "none", "stroke": colour}
    return _tag("circle", at, _tag("title", {}, _text(what)))


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
            _tag(
                "path",
                {"class": "mark", "d": f"M{left - 4},{top - 7}h8l-4,7z"},
                _tag("title", {}, _text(what)),
            )
        )
    return marks


def _distribution_plot(results: Sequence[PolicyResult]) -> tuple[str, str]:
    """For each length, the share of measurements that took longer: both by their logarithms."""
    durations = {r.policy: sorted(each.duration_s for each in r.measurements) for r in results}
    shortest = min(values[0] for values in durations.values())
    longest = max(values[-1] for values in durations.values())
    least = 1 / max(len(values) for values in durations.values())
    x = _Scale(shortest, longest, LEFT, END_X, log=True)
    y = _Scale(1.0, least, TOP, END_Y, log=True)
    content = [
        _row(y(tick), f"{100 * tick:g} %") for tick in _decades(least, 1.0) if least <= tick <= 1.0
    ]
    content += [
        _under(x(tick), seconds(tick))
        for tick in _decades(shortest, longest)
        if shortest <= tick <= longest
    ]
    for policy, values in durations.items():
        tail = max(0, len(values) - DRAWN_OF_THE_LONGEST)
        places = [*range(0, tail, max(1, len(values) // DRAWN)), *range(tail, len(values))]
        points = [(x(values[i]), y((len(values) - i) / len(values))) for i in places]
        content.append(_line(points, COLOURS[policy]))
    caption = "The share of measurements that took longer than a time, for each policy"
    return _svg([*content, *_legend(durations, END_X - 4, "end")], caption), caption


def _memory_plot(results: Sequence[PolicyResult]) -> tuple[str, str]:
    """How memory grew inside each policy's blocks, one after the other."""
    lines = {result.policy: _growth(result) for result in results}
    values = [value for line in lines.values() for _, value in line]
    longest_s = max(time_s for line in lines.values() for time_s, _ in line)
    x = _Scale(0, longest_s, LEFT, END_X)
    y = _Scale(min(values), max(values), END_Y, TOP)
    content = [_row(y(tick), size(tick)) for tick in sorted({min(values), 0.0, max(values)})]
    content += [
        _line([(x(time_s), y(value)) for time_s, value in line], COLOURS[policy])
        for policy, line in lines.items()
    ]
    caption = "Growth of the engine's anonymous memory inside the blocks of each policy"
    content += [*_legend(lines, LEFT + 8, "start"), _below(seconds(longest_s))]
    return _svg(content, caption), caption


def _growth(result: PolicyResult) -> list[tuple[float, float]]:
    elapsed_s = grown = 0.0
    line = [(0.0, 0.0)]
    for block in result.memory:
        known = [
            (each.read_s, each.anonymous_bytes)
            for each in block
            if each.anonymous_bytes is not None
        ]
        line += [
            (elapsed_s + read_s - block[0].read_s, grown + anonymous_bytes - known[0][1])
            for read_s, anonymous_bytes in known
        ]
        elapsed_s, grown = line[-1]
    return line
