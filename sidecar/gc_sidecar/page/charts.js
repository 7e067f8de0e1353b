/* Pauses and memory over time, on canvas. */

import { $, cells, make, put, sayRoles } from "./dom.js";
import { GENERATION, LENGTH, OBJECTS, PID, PLACE, SPAN_S, START, TRIGGER, earliest, isAt, now, pausesWithin, placeName, store } from "./store.js";
import { link } from "./stream.js";
import { verdictWord } from "./tables.js";
import { tip } from "./tip.js";
import { ROLES, SHORT_ROLES, clockTime, parseTime, seconds, size, timeOfDay } from "./words.js";

const LISTED = 20;
const TRIGGERS = {
  maintain: "full collection, asked for by maintain", restore: "full collection, asked for by restore",
  entry: "full collection on entering a policy", explicit: "collection by other code (gc.collect)",
};

// --- what is shown of the time ---

// `isFitted`: there is less than the span to see yet, and nobody has chosen one.
const view = { span: 900, from: 0, to: 0, isFollowing: true, isFitted: true };
const LEAST_S = 60;

function follow() {
  if (!view.isFollowing) return;
  [view.from, view.to] = [now() - view.span, now()];
  if (!view.isFitted) return;
  const first = Math.min(earliest(), view.to - LEAST_S);
  if (first > view.from) view.from = first;
  else {
    view.isFitted = false;
    showView();
  }
}

function show(from, to) {
  if (!(to - from > 0.01)) return;
  Object.assign(view, { from, to, isFollowing: false });
  showView();
}

function back() {
  view.isFollowing = true;
  showView();
}

export function showView() {
  for (const button of document.querySelectorAll("[data-span]")) {
    const isIt = view.isFollowing && !view.isFitted && view.span === Number(button.dataset.span);
    button.setAttribute("aria-pressed", String(isIt));
  }
  put($("follow"), view.isFollowing ? "Hold" : "Follow");
  put($("shown"), view.isFollowing ? "" : `${clockTime(view.from)} to ${clockTime(view.to)}, held`);
  draw();
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    Object.assign(view, { span: Number(button.dataset.span), isFitted: false });
    back();
  });
}
$("follow").addEventListener("click", () => (view.isFollowing ? show(view.from, view.to) : back()));
$("timeline").addEventListener("keydown", (event) => {
  const width = view.to - view.from;
  const middle = (view.from + view.to) / 2;
  const moves = {
    ArrowLeft: () => show(view.from - width / 4, view.to - width / 4),
    ArrowRight: () => show(view.from + width / 4, view.to + width / 4),
    "+": () => show(middle - width / 4, middle + width / 4),
    "-": () => show(Math.max(middle - width, now() - SPAN_S), Math.min(middle + width, now())),
    0: back,
  };
  if (event.altKey || event.ctrlKey || event.metaKey || !Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  moves[event.key]();
});

// --- drawing ---

const BAND = 18;
const AXIS = 30;
const [SHORTEST, LONGEST] = [Math.log10(0.0005), 1];
const COLOURS = [
  "auto", "asked", "explicit", "young", "clean", "dirty", "failed", "open", "ink", "faint", "line",
  "worker", "engine_core", "api_server",
];
const colours = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of COLOURS) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

/* How long an automatic full collection may take by the policy that is in force. */
function allowedS() {
  const { policy } = store.state ?? {};
  return policy?.mode === "budget" ? (policy.pause_budget_ms ?? 5) / 1000 : 0;
}

function colourOf(pause) {
  if (pause[GENERATION] !== 2) return "young";
  const trigger = pause[TRIGGER];
  if (trigger === "auto") return pause[LENGTH] <= allowedS() ? "young" : "auto";
  return trigger === "explicit" ? trigger : "asked";
}

function showLegend() {
  const hasBudget = allowedS() > 0;
  put($("legend-auto"), `full collection by Python itself${hasBudget ? ", longer than the budget" : ""}`);
  put($("legend-young"), `young collection${hasBudget ? ", or one within the budget" : ""}`);
}

/* A band that can be told from others without its colour: not clean is in stripes, open hollow, not done crossed. */
function paintBand(ctx, colour, left, top, width, ratio) {
  const height = (BAND - 4) * ratio;
  ctx.fillStyle = ctx.strokeStyle = colours[colour];
  if (colour === "open") {
    ctx.lineWidth = 2 * ratio;
    ctx.strokeRect(left + ratio, top + ratio, Math.max(2 * ratio, width - 2 * ratio), height - 2 * ratio);
  } else if (colour === "dirty") {
    for (const part of [0, 2]) ctx.fillRect(left, top + (part * height) / 3, width, height / 3);
  } else ctx.fillRect(left, top, width, height);
  if (colour !== "failed") return;
  const [x, y, arm] = [left + width / 2, top + height / 2, 5 * ratio];
  ctx.strokeStyle = colours.ink;
  ctx.lineWidth = 2 * ratio;
  ctx.beginPath();
  for (const way of [1, -1]) {
    ctx.moveTo(x - arm, y - way * arm);
    ctx.lineTo(x + arm, y + way * arm);
  }
  ctx.stroke();
}

const gutter = () => (document.documentElement.clientWidth < 640 ? 62 : 96);

const timeAxis = () => ({
  stroke: colours.faint, grid: { stroke: colours.line, width: 1 }, ticks: { stroke: colours.line, width: 1 },
  size: AXIS, font: "12px system-ui", space: 70,
  values: (_plot, splits, _axis, _space, step) => splits.map((at) => {
    const text = timeOfDay(at);
    if (step < 1) return `${text}.${String(Math.round((at % 1) * 1000)).padStart(3, "0")}`;
    return step < 60 ? text : text.slice(0, 5);
  }),
});

function commonOptions(element, height) {
  return {
    width: Math.max(200, element.clientWidth), height, legend: { show: false }, padding: [8, 30, 0, 0],
    cursor: {
      y: false, points: { show: false },
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => { back(); return null; } },
    },
    hooks: {
      setSelect: [(plot) => {
        const { left: start, width } = plot.select;
        if (width > 3) show(plot.posToVal(start, "x"), plot.posToVal(start + width, "x"));
        if (width) plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      }],
    },
  };
}

class Timeline {
  constructor(element) {
    this.element = element;
    this.plot = null;
    this.shape = "";
  }

  /* From top to bottom: operations, windows, and every process. */
  build() {
    const shape = [store.places.join(), this.element.clientWidth, gutter(), colours.ink].join("|");
    if (shape === this.shape) return;
    this.shape = shape;
    this.plot?.destroy();
    const count = Math.max(1, store.places.length);
    this.lane = Math.min(44, Math.max(12, Math.floor(560 / count)));
    // In the order of the table: the API servers first.
    this.order = store.places.map((_, place) => place).sort((one, other) => compare(store.places[one], store.places[other]));
    const total = 2 * BAND + count * this.lane;
    const isNarrow = gutter() < 90;
    const names = [isNarrow ? "oper." : "operations", "windows", ...this.order.map((place) => placeName(store.places[place], isNarrow ? SHORT_ROLES : ROLES))];
    const tops = [0, BAND, ...this.order.map((_, row) => 2 * BAND + row * this.lane)];
    const middles = tops.map((top, row) => top + (row < 2 ? BAND : this.lane) / 2);
    const common = commonOptions(this.element, total + AXIS + 8);
    this.plot = new uPlot({
      ...common,
      scales: { x: { time: true, auto: false }, y: { auto: false, range: [0, total], dir: -1 } },
      series: [{}, { show: false }],
      axes: [timeAxis(), {
        stroke: colours.faint, grid: { show: false }, ticks: { show: false }, size: gutter(), gap: 4,
        font: `${this.lane < 14 ? 10 : 12}px system-ui`, splits: () => middles, values: () => names,
      }],
      hooks: { ...common.hooks, draw: [(plot) => this.paint(plot)], setCursor: [(plot) => this.hover(plot)] },
    }, [[view.from, view.to], [null, null]], this.element);
    this.plot.over.addEventListener("mouseleave", () => tip.hide());
  }

  draw() {
    this.build();
    this.plot.setScale("x", { min: view.from, max: view.to });
  }

  paint(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const { from, to } = view;
    const scale = bbox.width / (to - from);
    const x = (at) => bbox.left + (at - from) * scale;
    const lane = this.lane * ratio;
    const top = bbox.top + 2 * BAND * ratio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const [start, end, colour] of bands(store.windows, windowBand)) {
      ctx.fillStyle = colours[colour];
      ctx.globalAlpha = 0.1;
      ctx.fillRect(x(start), bbox.top, (end - start) * scale, bbox.height);
      ctx.globalAlpha = 1;
      paintBand(ctx, colour, x(start), bbox.top + (BAND + 2) * ratio, Math.max(2 * ratio, (end - start) * scale), ratio);
    }
    for (const [start, end, colour] of bands(store.operations, operationBand)) {
      ctx.fillStyle = colours[colour];
      ctx.globalAlpha = 0.12;
      ctx.fillRect(x(start), bbox.top, Math.max(ratio, (end - start) * scale), bbox.height);
      ctx.globalAlpha = 1;
      paintBand(ctx, colour, x(start), bbox.top + 2 * ratio, Math.max(3 * ratio, (end - start) * scale), ratio);
    }
    ctx.fillStyle = colours.line;
    for (let row = 0; row <= this.order.length; row++) ctx.fillRect(bbox.left, top + row * lane - ratio / 2, bbox.width, ratio);
    // By colour: changing it costs more than drawing.
    const bars = { young: [], asked: [], explicit: [], auto: [] };
    this.order.forEach((place, row) => {
      const bottom = top + (row + 1) * lane - ratio;
      for (const pause of pausesWithin(place, from, to)) {
        const height = share(pause[LENGTH]) * (lane - 3 * ratio);
        bars[colourOf(pause)].push(x(pause[START]), bottom - height, Math.max(1.5 * ratio, pause[LENGTH] * scale), height);
      }
    });
    for (const [colour, list] of Object.entries(bars)) {
      ctx.fillStyle = colours[colour];
      for (let i = 0; i < list.length; i += 4) ctx.fillRect(list[i], list[i + 1], list[i + 2], list[i + 3]);
    }
    this.paintCollecting(ctx, x, top, lane, ratio);
    ctx.restore();
  }

  /* What has not ended grows at the right edge. */
  paintCollecting(ctx, x, top, lane, ratio) {
    if (!store.state || !link.isLive) return;
    ctx.globalAlpha = 0.5;
    for (const row of store.state.processes) {
      if (row.collecting_for_s === null) continue;
      const index = this.order.findIndex((place) => isAt(store.places[place], row));
      const lasted = row.collecting_for_s + now() - store.state.time;
      const height = share(lasted) * (lane - 3 * ratio);
      ctx.fillStyle = lasted <= allowedS() ? colours.young : colours.auto;
      if (index >= 0) ctx.fillRect(x(now() - lasted), top + (index + 1) * lane - ratio - height, Math.max(2 * ratio, x(now()) - x(now() - lasted)), height);
    }
    ctx.globalAlpha = 1;
  }

  hover(plot) {
    const { left: px, top: py } = plot.cursor;
    if (px === null || px < 0 || !this.element.matches(":hover")) return tip.hide();
    const at = plot.posToVal(px, "x");
    const slack = (6 * (view.to - view.from)) / plot.over.clientWidth;
    const text = py < BAND ? bandText(store.operations, operationBand, operationText, at, slack)
      : py < 2 * BAND ? bandText(store.windows, windowBand, windowText, at, slack)
      : pauseText(this.order[Math.floor((py - 2 * BAND) / this.lane)], at, slack);
    const box = plot.over.getBoundingClientRect();
    if (text) tip.show(text, box.left + px, box.top + py);
    else tip.hide();
  }
}

function compare(one, other) {
  const roles = ["api_server", "engine_core", "worker"];
  return roles.indexOf(one[0]) - roles.indexOf(other[0]) || one[1] - other[1] || one[2] - other[2];
}

/* The part of a lane that a pause is high: in equal steps for each factor of ten. */
const share = (length) => Math.min(1, Math.max(0.06, (Math.log10(length) - SHORTEST) / (LONGEST - SHORTEST)));

function* bands(map, bandOf) {
  for (const entry of map.values()) {
    const band = bandOf(entry);
    if (band[1] >= view.from && band[0] <= view.to) yield [...band, entry];
  }
}

function operationBand(operation) {
  const start = parseTime(operation.requested_at);
  const colour = { applied: "asked", running: "open" }[operation.state] || "failed";
  return [start, operation.duration_s === null ? now() : start + operation.duration_s, colour];
}

function windowBand(window) {
  const start = parseTime(window.opened_at);
  return [start, window.clean === null ? now() : start + window.duration_s, window.clean === null ? "open" : window.clean ? "clean" : "dirty"];
}

function bandText(map, bandOf, textOf, at, slack) {
  let found = null;
  for (const [start, end, , entry] of bands(map, bandOf)) if (at >= start - slack && at <= end + slack) found = entry;
  return found && textOf(found);
}

const operationText = (each) => `${each.kind}: ${each.state}, in ${each.done} of ${each.asked} processes\n${clockTime(parseTime(each.requested_at))}, took ${seconds(each.duration_s)}, owner ${each.owner}${each.detail ? `\n${each.detail}` : ""}`;
const windowText = (each) => `window ${each.name ?? each.id}: ${verdictWord(each)}\n${clockTime(parseTime(each.opened_at))}, ${seconds(each.clean === null ? now() - parseTime(each.opened_at) : each.duration_s)}${each.reasons.length ? `\n${each.reasons.join("\n")}` : ""}`;

function pauseText(place, at, slack) {
  let [found, distance] = [null, slack];
  for (const pause of pausesWithin(place, at - slack, at + slack)) {
    const away = Math.max(0, pause[START] - at, at - pause[START] - pause[LENGTH]);
    if (away < distance || (away === distance && found && pause[LENGTH] > found[LENGTH])) [found, distance] = [pause, away];
  }
  if (!found) return null;
  return `${placeName(store.places[place])} stood still for ${seconds(found[LENGTH])}\n${clockTime(found[START])}: ${whatOf(found)}\n${found[OBJECTS].toLocaleString()} objects collected, pid ${found[PID]}`;
}

function whatOf(pause) {
  if (pause[GENERATION] !== 2) return `young collection (gen${pause[GENERATION]}), ${pause[TRIGGER]}`;
  return TRIGGERS[pause[TRIGGER]] || "full collection by Python itself";
}

class MemoryChart {
  constructor(element) {
    this.element = element;
    this.plot = null;
    this.shape = "";
    this.drawn = -1;
    this.from = this.to = 0;
    this.focused = null;
  }

  build() {
    const shape = [store.places.join(), this.element.clientWidth, gutter(), colours.ink].join("|");
    if (shape === this.shape) return;
    this.shape = shape;
    this.drawn = -1;
    this.plot?.destroy();
    const common = commonOptions(this.element, 200);
    const isCrowded = store.places.length > 8;
    this.plot = new uPlot({
      ...common,
      cursor: { ...common.cursor, focus: { prox: 24 } },
      focus: { alpha: 0.3 },
      scales: { x: { time: true, auto: false }, y: { range: (_, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
      series: [{}, ...store.places.map((place) => ({ stroke: colours[place[0]], width: isCrowded ? 1 : 1.5, points: { show: false }, spanGaps: false }))],
      axes: [timeAxis(), {
        stroke: colours.faint, grid: { stroke: colours.line, width: 1 }, ticks: { show: false }, size: gutter(), gap: 4, font: "12px system-ui",
        // Powers of two of a MiB, so that GiB come out even.
        incrs: Array.from({ length: 24 }, (_, power) => 2 ** (power - 3)),
        values: (_, splits) => splits.map((each) => size(each * 1048576)),
      }],
      hooks: { ...common.hooks, setCursor: [(plot) => this.hover(plot)], setSeries: [(_, index) => { this.focused = index; }] },
    }, [[], ...store.places.map(() => [])], this.element);
    this.plot.over.addEventListener("mouseleave", () => tip.hide());
    const roles = [...new Set(store.places.map(([role]) => role))];
    $("roles").replaceChildren(...roles.map((role) => {
      const item = make("li");
      item.append(make("i", "", `key ${Object.hasOwn(ROLES, role) ? role : ""}`), ROLES[role] || role);
      return item;
    }));
  }

  draw() {
    this.build();
    const newest = store.memoryTimes.at(-1) ?? 0;
    const pixel = (view.to - view.from) / this.plot.over.clientWidth;
    const moved = Math.max(Math.abs(view.from - this.from), Math.abs(view.to - this.to));
    // It is the most to draw: not again for what nobody could see.
    if (newest === this.drawn && moved < 2 * pixel) return;
    if (newest !== this.drawn) {
      this.drawn = newest;
      const { length } = store.memoryTimes;
      this.plot.setData([store.memoryTimes, ...store.places.map((_, place) => {
        const series = (store.memory[place] ||= []);
        while (series.length < length) series.push(null);
        return series;
      })], false);
    }
    Object.assign(this, { from: view.from, to: view.to });
    this.plot.setScale("x", { min: view.from, max: view.to });
  }

  hover(plot) {
    const { left: px, top: py, idx } = plot.cursor;
    const value = this.focused && idx !== null ? plot.data[this.focused]?.[idx] : null;
    if (px === null || px < 0 || value === null || value === undefined || !this.element.matches(":hover")) return tip.hide();
    const box = plot.over.getBoundingClientRect();
    tip.show(`${placeName(store.places[this.focused - 1])}: ${size(value * 1048576)}\n${clockTime(plot.data[0][idx])}`, box.left + px, box.top + py);
  }
}

const timeline = new Timeline($("timeline"));
const memoryChart = new MemoryChart($("memory"));

let isDue = false;
export function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!store.places.length) return;
    if (link.isLive) follow();
    showLegend();
    timeline.draw();
    // In a frame of its own, so that neither has the other wait.
    requestAnimationFrame(() => memoryChart.draw());
  });
}


export function showListed() {
  if (!$("listed").open) return;
  const found = store.places.flatMap((_, place) => [...pausesWithin(place, view.from, view.to)]);
  found.sort((one, other) => other[LENGTH] - one[LENGTH]);
  const body = $("listed").querySelector("tbody");
  body.replaceChildren(...found.slice(0, LISTED).map((pause) => {
    const row = make("tr");
    const texts = [clockTime(pause[START]), placeName(store.places[pause[PLACE]]), seconds(pause[LENGTH]), whatOf(pause), pause[OBJECTS].toLocaleString()];
    cells(row, ["", "", "figure", "wide", "figure"], ["when", "process", "length", "what", "objects"]).forEach((cell, index) => put(cell, texts[index]));
    sayRoles(row);
    return row;
  }));
}
$("listed").addEventListener("toggle", showListed);
