/* The page of gc-sidecar: what the sidecar tells goes into `store`, and from there into tables and charts.

   Only what changed is written, and nothing is drawn while nobody looks. */

import { showActions } from "./actions.js";
import { draw, readColours, showListed, showView } from "./charts.js";
import { $, make, put } from "./dom.js";
import { addMemory, addPauses, keepNewest, now, store } from "./store.js";
import { connect, endIfSilent, handlers, link, setToken } from "./stream.js";
import { processRows, showOperations, showWindows } from "./tables.js";
import { clockTime, digits, left, parseTime, sentence, zoneName } from "./words.js";

handlers.events = {
  history(value) {
    if (value.is_new) store.forget();
  },
  places(value) {
    store.places = value;
  },
  pauses: addPauses,
  memory: addMemory,
  operations(value) {
    keepNewest(store.operations, value);
    showOperations();
  },
  windows(value) {
    keepNewest(store.windows, value);
    showWindows();
  },
  state(value) {
    store.clock = value.time - performance.now() / 1000;
    store.state = value;
    showState();
  },
};
handlers.onNews = draw;
handlers.onLink = showState;

// --- is it safe? ---

/* The answer for data-answer, in a word, and in a sentence. */
function verdict() {
  const state = store.state;
  if (link.needsToken) return ["unknown", "Not known.", "The sidecar asks for a token first."];
  if (link.lostAt) {
    const why = link.refused ? ` (${link.refused})` : "";
    return ["unknown", "Not known.", `Not connected to the sidecar since ${clockTime(link.lostAt)}${why}. What is below is from then.`];
  }
  if (!state || !link.isLive) return ["unknown", "Not known.", "Waiting for the sidecar."];
  const { policy, coverage, safe_to_measure } = state;
  const { answer, word, why } = safe_to_measure;
  if (policy.mode === "off") return [answer, word, why];
  const what = policy.mode === "budget" ? `a budget of ${digits(policy.pause_budget_ms ?? 5)} ms` : policy.mode;
  return [
    answer,
    word,
    `${why} In force: ${what} by ${policy.owner}, in ${coverage.acknowledged} of ${coverage.expected} processes,` +
      ` since ${clockTime(parseTime(policy.entered_at))}, until ${clockTime(parseTime(policy.lease_expires_at))}.`,
  ];
}

const MARKS = { yes: "✓", no: "✗", unknown: "?" };

function showVerdict() {
  const [answer, word, text] = verdict();
  if ($("verdict").dataset.answer !== answer) $("verdict").dataset.answer = answer;
  put($("answer"), word);
  put($("why"), text);
  const title = `${MARKS[answer]} gc-sidecar`;
  if (document.title !== title) document.title = title;
}

function showState() {
  const { state } = store;
  showVerdict();
  put($("link"), link.isLive ? "live" : link.lostAt ? `not connected since ${clockTime(link.lostAt)}` : "connecting");
  put($("zone"), `times in ${zoneName()}`);
  $("main").classList.toggle("stale", !link.isLive);
  showToken();
  showActions();
  if (!state) return;
  const { policy, coverage } = state;
  put($("version"), state.version);
  put($("fact-policy"), policy.mode === "budget" ? `budget of ${digits(policy.pause_budget_ms ?? 5)} ms` : policy.mode);
  put($("fact-since"), clockTime(parseTime(policy.entered_at)));
  put($("fact-owner"), (policy.mode !== "off" && policy.owner) || "–");
  put($("fact-coverage"), `${coverage.acknowledged} of ${coverage.expected}`);
  put($("fact-transport"), state.transport);
  showReasons(state.reasons);
  processRows.sync(state.processes, (row) => `${row.role}-${row.dp_rank}-${row.rank}`);
  tick();
}

let toldReasons = "";
function showReasons(reasons) {
  const text = JSON.stringify(reasons);
  if (text === toldReasons) return;
  toldReasons = text;
  $("reasons").hidden = !reasons.length;
  $("reasons").replaceChildren(
    ...reasons.map(({ detail, remedy }) => {
      const item = make("li", sentence(detail));
      if (remedy) item.append(" ", make("span", `What to do: ${sentence(remedy)}`, "remedy"));
      return item;
    }),
  );
}

/* What goes on between two updates: the lease runs out, a collection lasts. */
function tick() {
  const { state } = store;
  if (!state) return;
  const until = state.policy.mode === "off" ? null : parseTime(state.policy.lease_expires_at);
  const rest = link.isLive ? ` (${left(until - now())} left)` : "";
  put($("fact-until"), until ? `${clockTime(until)}${rest}` : "–");
  processRows.each((row) => row.tick());
}

// --- the token ---

function showToken() {
  const appears = $("token").hidden && link.needsToken;
  if ($("token").hidden === link.needsToken) $("token").hidden = !link.needsToken;
  if (!link.needsToken) return;
  if (link.tokenWasWrong) put($("token-text"), "The sidecar does not take this token. It asks for what is in the file of its --token-file.");
  if (appears) $("token-field").focus();
}

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token-field").value.trim();
  $("token-field").value = "";
  setToken(token);
  showState();
});

// --- as time goes by ---

let beats = 0;
setInterval(() => {
  if (document.hidden) return;
  tick();
  const isCollecting = store.state?.processes.some((row) => row.collecting_for_s !== null);
  if (isCollecting || beats % 4 === 0) draw();
  if (beats % 8 === 0) showListed();
  beats++;
}, 250);
setInterval(endIfSilent, 1000);

function hurry() {
  endIfSilent();
  if (!link.isLive && !link.needsToken) connect();
}
addEventListener("online", hurry);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  hurry();
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  draw();
});
new ResizeObserver(draw).observe($("main"));

readColours();
showView();
connect();
