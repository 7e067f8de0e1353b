/* What is known: the last hour, bounded here as it is in the sidecar. */

import { ROLES, parseTime } from "./words.js";

export const SPAN_S = 3600;
const KEPT_PAUSES = 20000;
const KEPT_MEMORY = 740;
const KEPT_ENTRIES = 256;
// No pause is looked for that began longer ago than this.
const LONGEST_S = 300;

export const store = {
  lastId: "", places: [], lanes: [], count: 0,
  memoryTimes: [], memory: [], operations: new Map(), windows: new Map(), state: null,
  // The sidecar's clock less this tab's own one, which nobody sets.
  clock: 0,
  forget() {
    Object.assign(this, { places: [], lanes: [], count: 0, memoryTimes: [], memory: [], state: null });
    this.operations.clear();
    this.windows.clear();
  },
};
export const now = () => store.clock + performance.now() / 1000;

/* The parts of a pause. */
export const [PLACE, START, LENGTH, GENERATION, TRIGGER, OBJECTS, PID] = [0, 1, 2, 3, 4, 5, 6];

export function addPauses(pauses) {
  for (const pause of pauses) {
    const lane = (store.lanes[pause[PLACE]] ||= []);
    lane.push(pause);
    // A late one is put where it belongs.
    for (let i = lane.length - 1; i > 0 && lane[i - 1][START] > pause[START]; i--) {
      [lane[i - 1], lane[i]] = [lane[i], lane[i - 1]];
    }
    store.count++;
  }
  const oldest = now() - SPAN_S;
  for (const lane of store.lanes) {
    if (!lane) continue;
    const expired = firstAfter(lane, oldest);
    if (expired > 100 || (expired && store.count > KEPT_PAUSES)) store.count -= lane.splice(0, expired).length;
  }
  while (store.count > KEPT_PAUSES + 1000) {
    for (const lane of store.lanes) if (lane) store.count -= lane.splice(0, Math.ceil(lane.length / 10)).length;
  }
}

/* The index of the first pause that began at this time or later. */
function firstAfter(lane, at) {
  let [low, high] = [0, lane.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane[middle][START] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* When the first began of all that is kept; Infinity where nothing is. */
export function earliest() {
  return Math.min(
    ...store.memoryTimes.slice(0, 1), ...store.lanes.map((lane) => lane?.[0]?.[START] ?? Infinity),
    ...[...store.operations.values()].map((each) => parseTime(each.requested_at)),
    ...[...store.windows.values()].map((each) => parseTime(each.opened_at)),
  );
}

/* The pauses of a place that reach into a stretch of time. */
export function* pausesWithin(place, from, to) {
  const lane = store.lanes[place] || [];
  for (let i = firstAfter(lane, from - LONGEST_S); i < lane.length && lane[i][START] <= to; i++) {
    if (lane[i][START] + lane[i][LENGTH] >= from) yield lane[i];
  }
}

export function addMemory(points) {
  for (const [at, sizes] of points) {
    store.memoryTimes.push(at);
    const length = store.memoryTimes.length;
    for (let place = 0; place < Math.max(sizes.length, store.memory.length); place++) {
      const series = (store.memory[place] ||= []);
      while (series.length < length - 1) series.push(null);
      series.push(sizes[place] ?? null);
    }
  }
  const spare = store.memoryTimes.length - KEPT_MEMORY;
  if (spare > 0) for (const series of [store.memoryTimes, ...store.memory]) series.splice(0, spare);
}

export function keepNewest(map, entries) {
  for (const entry of entries) map.set(entry.id, entry);
  for (const id of map.keys()) {
    if (map.size <= KEPT_ENTRIES) break;
    map.delete(id);
  }
}

export function placeName([role, dpRank, rank], names = ROLES) {
  const hasRanks = store.places.filter(([each]) => each === role).length > 1;
  const dp = store.places.some(([, each]) => each > 0) ? ` dp${dpRank}` : "";
  return `${names[role] || role}${dp}${hasRanks ? ` ${rank}` : ""}`;
}

export const isAt = ([role, dp, rank], row) => role === row.role && dp === row.dp_rank && rank === row.rank;

/* The length of the newest full collection of a process. */
export function lastFull(row) {
  const place = store.places.findIndex((each) => isAt(each, row));
  const lane = store.lanes[place] || [];
  for (let i = lane.length - 1; i >= 0; i--) {
    if (lane[i][GENERATION] === 2 && lane[i][PID] === row.pid) return lane[i][LENGTH];
  }
  return null;
}
