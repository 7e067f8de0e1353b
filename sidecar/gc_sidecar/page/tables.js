/* The tables: processes, operations, windows. */

import { $, Rows, cells, labelled, make, put, sayRoles } from "./dom.js";
import { lastFull, now, placeName, store } from "./store.js";
import { ask, link } from "./stream.js";
import { clockTime, parseTime, roleName, seconds, signed, size } from "./words.js";

const LISTED = 20;
// Whether a process in such a state collects is not known.
const UNSEEN = ["gone", "uncovered", "stale"];
const STATES = {
  applied: ["good", "as asked"], pending: ["wait", "changing"], drifted: ["bad", "changed by others"],
  stale: ["bad", "silent"], gone: ["bad", "ended"], uncovered: ["bad", "not seen"], refused: ["bad", "refused"],
};

export const processRows = new Rows($("processes").tBodies[0], () => {
  const element = make("tr");
  const head = element.appendChild(make("th", "", "wide"));
  head.scope = "row";
  const name = head.appendChild(make("span"));
  const figures = Array(5).fill("figure");
  const labels = ["", "now", "last", "longest", "memory", "growth", "pid"];
  const [state, busy, last, longest, memory, growth, pid] = cells(element, ["", "", ...figures], labels);
  sayRoles(element);
  const word = state.appendChild(make("span"));
  const reason = state.appendChild(make("small"));
  let current = null;
  let collectingSince = 0;
  return {
    elements: [element],
    update(row) {
      current = row;
      const several = store.state.processes.filter((each) => each.role === row.role).length > 1;
      const dp = store.state.processes.some((each) => each.dp_rank > 0) ? ` dp${row.dp_rank}` : "";
      put(name, `${roleName(row)}${dp}${several ? ` ${row.rank}` : ""}`);
      const [kind, text] = STATES[row.state] || ["wait", row.state];
      put(word, row.state === "applied" && row.mode ? (row.mode === "off" ? "normal GC" : row.mode) : text);
      if (state.className !== kind) state.className = kind;
      put(reason, row.reason ?? "");
      put(longest, seconds(row.pauses.gen2.count ? row.pauses.gen2.max_s : null));
      put(memory, size(row.memory.anonymous_bytes));
      put(growth, signed(row.memory.growth_bytes));
      put(pid, String(row.pid ?? "–"));
      if (row.collecting_for_s !== null) collectingSince = now() - row.collecting_for_s;
      put(last, seconds(lastFull(row)));
      this.tick();
    },
    tick() {
      const key = `${current.role}-${current.dp_rank}-${current.rank}`;
      const isSeen = link.isLive && !UNSEEN.includes(current.state) && !store.state.without_page.includes(key);
      const isBusy = link.isLive && current.collecting_for_s !== null;
      put(busy, isBusy ? `for ${(now() - collectingSince).toFixed(1)} s` : isSeen ? "no" : "–", isBusy ? "busy" : "");
    },
  };
});

const newest = (map) => [...map.values()].reverse().slice(0, LISTED);

export function showOperations() {
  operationRows.sync(newest(store.operations), (operation) => operation.id);
}

const operationRows = new Rows($("operations").tBodies[0], (first) => {
  const element = make("tr");
  const [when, what, result, took, owner, done] = cells(
    element, ["", "wide", "whole", "figure", "", ""], ["when", "what", "", "took", "owner", "done by"],
  );
  const word = result.appendChild(make("span"));
  const detail = result.appendChild(make("small"));
  const count = done.appendChild(make("span"));
  const button = make("button", "details");
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  done.append(" ", button);
  const inner = make("tr");
  inner.hidden = true;
  const box = inner.appendChild(make("td", "", "inner"));
  box.colSpan = 6;
  sayRoles(element);
  sayRoles(inner);
  async function load() {
    const { body } = await ask("GET", `gc/operations/${encodeURIComponent(first.id)}`);
    box.replaceChildren(body?.operation ? outcomes(body.operation) : make("p", body?.detail ?? "The sidecar did not answer."));
  }
  function open(isOpen) {
    inner.hidden = !isOpen;
    button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) load();
  }
  button.addEventListener("click", () => open(inner.hidden));
  let shown = null;
  return {
    elements: [element, inner],
    update(operation) {
      if (operation === shown) return;
      const isNews = shown !== null;
      shown = operation;
      button.setAttribute("aria-label", `details of ${operation.kind} ${operation.id}`);
      put(when, clockTime(parseTime(operation.requested_at)));
      put(what, operation.kind);
      const kind = { applied: "good", running: "wait", partial: "wait" }[operation.state] || "bad";
      put(word, operation.state);
      if (!result.classList.contains(kind)) result.className = `whole ${kind}`;
      put(detail, operation.detail ?? "");
      put(took, seconds(operation.duration_s));
      put(owner, operation.owner);
      put(count, operation.asked ? `${operation.done} of ${operation.asked}` : "–");
      if (isNews && !inner.hidden) load();
    },
  };
});

function outcomes(operation) {
  const table = make("table", "", "cards");
  const head = table.createTHead().insertRow();
  for (const [title, kind] of [["Process"], ["Result"], ["Pause", "figure"], ["Objects collected", "figure"], ["Memory", "figure"]]) {
    const cell = head.appendChild(make("th", title, kind));
    cell.scope = "col";
  }
  const body = table.createTBody();
  for (const row of operation.processes) {
    const line = body.insertRow();
    const cell = line.appendChild(make("th", placeName([row.role, row.dp_rank, row.rank])));
    cell.scope = "row";
    cell.append(make("small", row.pid === null ? "" : `pid ${row.pid}`));
    const result = line.appendChild(make("td", row.ok ? "ok" : row.code ?? "no", `wide ${row.ok ? "good" : "bad"}`));
    if (row.detail) result.append(make("small", row.detail));
    const collected = row.collected_objects === null ? "–" : row.collected_objects.toLocaleString();
    for (const [label, text] of [["pause", seconds(row.pause_s)], ["objects", collected], ["memory", signed(row.resident_delta_bytes)]]) {
      line.append(labelled(make("td", text, "figure"), label));
    }
  }
  sayRoles(table);
  return table;
}

export function showWindows() {
  windowRows.sync(newest(store.windows), (window) => window.id);
}

const windowRows = new Rows($("windows").tBodies[0], () => {
  const element = make("tr");
  const [when, name, verdictCell, length, why] = cells(
    element, ["", "wide", "", "wide figure", "whole lines"], ["opened", "window", "", "length", "why"],
  );
  sayRoles(element);
  const title = name.appendChild(make("span"));
  const id = name.appendChild(make("small"));
  return {
    elements: [element],
    update(window) {
      put(when, clockTime(parseTime(window.opened_at)));
      put(title, window.name ?? window.id);
      put(id, window.name ? window.id : "");
      put(verdictCell, verdictWord(window), window.clean === null ? "wait" : window.clean ? "good" : "bad");
      put(length, window.clean === null ? "–" : seconds(window.duration_s));
      put(why, window.reasons.join("\n"));
    },
  };
});

export const verdictWord = (window) => (window.clean === null ? window.state : window.clean ? "clean" : "not clean");
