/* The buttons: each says what it costs before it acts, and what went wrong where it did not. */

import { $, make, put } from "./dom.js";
import { lastFull, placeName, store } from "./store.js";
import { ask, link } from "./stream.js";
import { OPERATIONS, seconds, sentence, several } from "./words.js";

const OWNER = "gc-sidecar-owner";
const ACTIONS = {
  freeze: {
    title: "Freeze: no automatic full collection", go: "Freeze", fields: ["lease"],
    request: () => ["POST", "gc/freeze", { lease_s: minutes() }],
    then: "Afterwards none runs by itself until somebody restores or the time is over; garbage that refers to itself waits, and memory may grow.",
  },
  budget: {
    title: "Budget: only short collections", go: "Enter budget", fields: ["lease", "budget"],
    request: () => ["PUT", "gc/policy", { mode: "budget", lease_s: minutes(), pause_budget_ms: Number($("field-budget").value) }],
    then: "Afterwards automatic collections are kept to the length below, until somebody restores or the time is over.",
  },
  maintain: {
    title: "Maintain: collect once, now", go: "Maintain", fields: ["when", "trim"],
    request: () => ["POST", "gc/maintain", { when: $("field-when").value, trim: $("field-trim").checked }],
    then: "It frees garbage that has waited, for Python to use that memory again; the system seldom gets it back without trim. The policy stays as it is.",
  },
  restore: {
    title: "Restore: back to normal GC", go: "Restore", fields: [],
    request: () => ["POST", "gc/restore", {}],
    then: "Every process gets back what it had before the policy, and automatic full collections come again. Safe at any time.",
  },
};
const minutes = () => Number($("field-lease").value) * 60;
let chosen = null;
let isAsking = false;

/* Whether it asks for no more than that what is on lasts longer: then nothing is collected, and no setting is changed. */
function isRenewal(name) {
  const { policy, coverage } = store.state;
  if (name !== policy.mode || policy.owner !== $("field-owner").value) return false;
  if (name === "budget" && policy.pause_budget_ms !== Number($("field-budget").value)) return false;
  return coverage.acknowledged === coverage.expected;
}

function costOf(name) {
  const { policy, processes, expected_pause_s: expected } = store.state;
  const living = processes.filter((row) => row.pid !== null && row.state !== "gone").length;
  if (name === "restore" && policy.mode === "off") {
    return "No policy is on: this makes sure of it in every process, and collects where something was left.";
  }
  if (isRenewal(name)) return "The policy is on already: this renews it, and no collection runs.";
  // Where none was asked for yet, Python's own tell: they walk the same heap.
  const own = Math.max(0, ...processes.map((row) => lastFull(row) ?? 0));
  const lasts = expected ? `, about ${seconds(expected)} by the last one and how the heap has grown since`
    : own ? `, about ${seconds(own)} by the last one` : "; for how long is not known yet";
  return `This runs a full collection in ${several(living, "process")} now, side by side${lasts}. Meanwhile they stand still.`;
}

function warning() {
  const { policy } = store.state;
  const open = [...store.windows.values()].filter((window) => window.clean === null);
  const warnings = [];
  if (open.length) warnings.push(`Somebody measures: window ${open.map((each) => each.name ?? each.id).join(", ")} is open and will not be clean.`);
  if (policy.mode !== "off" && policy.owner !== $("field-owner").value) warnings.push(`The policy belongs to ${policy.owner}: as another owner you will be refused.`);
  return warnings.join(" ");
}

/* Which buttons there are now. */
export function showActions() {
  const nobody = !store.state?.processes.length;
  for (const button of $("actions").children) {
    button.disabled = !link.isLive || isAsking || (nobody && button.dataset.action !== "restore");
  }
  if (!store.state) return;
  if ($("dialog").open && !isAsking) showCost();
  $("actions").hidden = !store.state.may_act;
  $("read-only").hidden = store.state.may_act;
}

function openDialog(name) {
  chosen = { name, id: newId(), sent: "" };
  const action = ACTIONS[name];
  put($("dialog-title"), action.title);
  put($("dialog-go"), action.go);
  $("dialog-problem").replaceChildren();
  $("field-lease").value ||= "60";
  $("field-budget").value ||= "5";
  $("field-owner").value ||= sessionStorage.getItem(OWNER) || "anonymous";
  $("field-force").checked = $("field-trim").checked = false;
  for (const label of document.querySelectorAll("[data-field]")) {
    label.hidden = !action.fields.includes(label.dataset.field);
    for (const field of label.querySelectorAll("input, select")) field.disabled = label.hidden;
  }
  showCost();
  $("dialog").showModal();
}

function showCost() {
  if (!store.state) return;
  put($("dialog-cost"), `${costOf(chosen.name)} ${ACTIONS[chosen.name].then}`);
  put($("dialog-warning"), warning());
  $("dialog-warning").hidden = !warning();
}

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

async function act() {
  const action = ACTIONS[chosen.name];
  const owner = $("field-owner").value;
  sessionStorage.setItem(OWNER, owner);
  const renewal = ["POST", "gc/lease", { lease_s: minutes() }];
  const [method, url, own] = isRenewal(chosen.name) ? renewal : action.request();
  const fields = { ...own, owner, ...($("field-force").checked ? { force: true } : {}) };
  // The same request has the same id: where no answer came, asking again does nothing twice.
  const text = JSON.stringify(fields);
  if (chosen.sent !== text) Object.assign(chosen, { id: newId(), sent: text });
  $("dialog-problem").replaceChildren();
  const started = performance.now();
  const timer = setInterval(() => put($("dialog-go"), `Running for ${((performance.now() - started) / 1000).toFixed(1)} s`), 100);
  isAsking = $("dialog-go").disabled = true;
  showActions();
  const { status, isOk, body } = await ask(method, url, { ...fields, operation_id: chosen.id });
  clearInterval(timer);
  isAsking = $("dialog-go").disabled = false;
  showActions();
  put($("dialog-go"), action.go);
  if (isOk) {
    $("dialog").close();
    return showOutcome(body.operation, status === 202);
  }
  if (status) chosen.sent = "";
  showProblem(body);
  // Whoever has closed it meanwhile is told all the same.
  if (!$("dialog").open) put($("outcome"), $("dialog-problem").textContent);
}

function showProblem(problem) {
  const box = $("dialog-problem");
  if (!problem) {
    box.replaceChildren(make("p", "The sidecar did not answer. Whether it was done is not known; ask again, nothing is done twice."));
    return;
  }
  box.append(make("p", ""));
  box.firstChild.append(make("strong", `${problem.title ?? "Refused"}.`), ` ${sentence(problem.detail ?? "no reason was given")}`);
  if (problem.remedy) box.append(make("p", `What to do: ${sentence(problem.remedy)}`));
  for (const row of problem.operation?.processes ?? []) {
    if (!row.ok) box.append(make("p", `${placeName([row.role, row.dp_rank, row.rank])}: ${row.code ?? ""} ${row.detail ?? ""}`));
  }
  const mayForce = ["owned_by_other", "pause_too_long"].includes(problem.code) || (problem.code === "operation_running" && chosen.name === "restore");
  if (mayForce) {
    const label = document.querySelector("[data-field=force]");
    label.hidden = $("field-force").disabled = false;
  }
}

function showOutcome(operation, goesOn) {
  const done = operation.processes.filter((row) => row.ok).length;
  const [going, finished] = OPERATIONS[operation.kind] || [operation.kind, `${operation.kind} ${operation.state}`];
  put($("outcome"), goesOn ? `${going} goes on: see the last operations.`
    : `${finished} in ${done} of ${operation.processes.length} processes, in ${seconds(operation.duration_s)}.`);
}

for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => openDialog(button.dataset.action));
}
$("dialog-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!isAsking) act();
});
$("dialog-cancel").addEventListener("click", () => $("dialog").close());
for (const name of ["owner", "budget"]) $(`field-${name}`).addEventListener("input", showCost);
