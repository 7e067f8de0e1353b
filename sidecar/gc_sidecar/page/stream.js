/* The connection: what the sidecar tells, taken up again whenever it breaks, and what the sidecar is asked.

   The events are read by fetch and not by an EventSource, which cannot send a token. */

import { store } from "./store.js";

const SILENCE_MS = 6000;
const [FIRST_WAIT_MS, LONGEST_WAIT_MS] = [300, 5000];
// A stream that ended sooner is not taken up again at once: its end may have a reason.
const SHORT_MS = 3000;
// Of this tab alone, and for as long as it lives.
const TOKEN = "gc-sidecar-token";

/* `isLive`: what is shown is of now. `lostAt`: since when it is not. */
export const link = { isLive: false, lostAt: null, needsToken: false, tokenWasWrong: false, refused: "" };

/* Set by the page: what to do with each event, and when the link has changed. */
export const handlers = { events: {}, onLink() {}, onNews() {} };

let current = null;
let retry = 0;
let waitMs = 0;
// When anything came last, and when the end of an update did: only then is what is shown of now.
let heardAt = 0;
let heardAllAt = 0;
// When the connection was asked for, and the sidecar's time at the first of its updates: how late others come.
let askedAt = 0;
let firstTime = null;
// The events of an update that has not come whole yet.
let pending = [];

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, Authorization: `Bearer ${token}` } : more;
}

export async function connect() {
  clearTimeout(retry);
  current?.abort();
  const own = (current = new AbortController());
  heardAt = askedAt = performance.now();
  firstTime = null;
  pending = [];
  let hasHeard = false;
  try {
    const answer = await fetch("gc/events", {
      headers: headers(store.lastId ? { "Last-Event-ID": store.lastId } : {}),
      cache: "no-store",
      signal: own.signal,
    });
    if (answer.status === 401) return askForToken();
    if (!answer.ok) throw new Error(await problemOf(answer));
    link.refused = "";
    await read(answer.body.getReader(), () => { hasHeard = true; });
  } catch (error) {
    // Of the network there is nothing to say that "not connected" does not.
    if (own === current) link.refused = error instanceof TypeError ? "" : error.message;
  }
  if (own !== current) return;
  // A stream that ended in good order is to be taken up again at once.
  const isInOrder = hasHeard && !link.refused;
  const hasLasted = performance.now() - askedAt > SHORT_MS;
  if (isInOrder && hasLasted) return connect();
  // What it told is of now all the same, for as long as silence may last.
  if (!isInOrder) lose();
  waitMs = Math.min(LONGEST_WAIT_MS, (!hasLasted && waitMs * 2) || FIRST_WAIT_MS);
  retry = setTimeout(connect, waitMs * (0.75 + Math.random() / 2));
}

/* Where nothing came for longer than it can take, the connection is dead, whatever the system says. */
export function endIfSilent() {
  if (!current || link.needsToken) return;
  if (performance.now() - (link.isLive ? heardAllAt : heardAt) > SILENCE_MS) {
    lose();
    connect();
  }
}

export function setToken(token) {
  // No header can hold any other, and no sidecar takes one.
  if (!/^[\x21-\x7e]+$/.test(token)) {
    link.tokenWasWrong = true;
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  link.needsToken = false;
  connect();
}

function askForToken() {
  link.tokenWasWrong = sessionStorage.getItem(TOKEN) !== null;
  link.needsToken = true;
  link.isLive = false;
  sessionStorage.removeItem(TOKEN);
  current?.abort();
  current = null;
  handlers.onLink();
}

function lose() {
  link.isLive = false;
  link.lostAt ??= Date.now() / 1000;
  handlers.onLink();
}

async function problemOf(answer) {
  try {
    const problem = await answer.json();
    return `${problem.detail}${problem.remedy ? `: ${problem.remedy}` : ""}`;
  } catch {
    return `the sidecar answered ${answer.status}`;
  }
}

async function read(reader, onUpdate) {
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heardAt = performance.now();
    text += decoder.decode(value, { stream: true });
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      if (hear(text.slice(0, end))) onUpdate();
      text = text.slice(end + 2);
    }
    handlers.onNews();
  }
}

/* One event. The last of an update has an id, and with it all of the update has been heard. */
function hear(block) {
  const event = {};
  for (const line of block.split("\n")) {
    const colon = line.indexOf(": ");
    if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
  }
  if (Object.hasOwn(handlers.events, event.event)) pending.push([event.event, JSON.parse(event.data)]);
  if (!event.id) return false;
  // Together: an update that was cut off comes again, and must not be counted twice.
  store.lastId = event.id;
  const whole = pending;
  pending = [];
  heardAllAt = performance.now();
  const { time } = whole.at(-1)[1];
  firstTime ??= time;
  // What some proxy holds back comes as a steady stream too, and is of long ago.
  const isLate = heardAllAt - askedAt - 1000 * (time - firstTime) > SILENCE_MS;
  if (!isLate) Object.assign(link, { isLive: true, lostAt: null });
  for (const [name, value] of whole) handlers.events[name](value);
  if (isLate) throw new Error("what it tells comes too late");
  return true;
}

/* Asks the API. `status` is 0 where no answer came. */
export async function ask(method, url, fields) {
  try {
    const answer = await fetch(url, {
      method,
      cache: "no-store",
      headers: headers(fields ? { "Content-Type": "application/json" } : {}),
      body: fields && JSON.stringify(fields),
    });
    const body = await answer.json();
    if (answer.status === 401) askForToken();
    return { status: answer.status, isOk: answer.ok, body };
  } catch {
    return { status: 0, isOk: false, body: null };
  }
}
