/* Numbers and times for people. What is not known is a dash, never a zero. */

export const ROLES = { worker: "worker", engine_core: "engine core", api_server: "API server" };
export const SHORT_ROLES = { worker: "w", engine_core: "core", api_server: "api" };

export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value >= 0.9995) return `${digits(value)} s`;
  if (value >= 0.0009995) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

export function size(value) {
  if (typeof value !== "number") return "–";
  let scaled = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(scaled) < 1000) return unit === "B" ? `${scaled} B` : `${digits(scaled)} ${unit}`;
    scaled /= 1024;
  }
  return `${digits(scaled)} TiB`;
}

export const signed = (value) => (typeof value === "number" && value > 0 ? `+${size(value)}` : size(value));

export function left(value) {
  const total = Math.max(0, Math.round(value));
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor((total % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${total % 60} s` : `${total} s`;
}

const timeFormat = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const dayFormat = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const zoneFormat = new Intl.DateTimeFormat("en-GB", { timeZoneName: "shortOffset" });
export const timeOfDay = (at) => timeFormat.format(new Date(at * 1000));

/* With its date, unless that is of today. */
export function clockTime(at) {
  if (!at) return "–";
  const moment = new Date(at * 1000);
  const isToday = moment.toDateString() === new Date().toDateString();
  return isToday ? timeOfDay(at) : `${dayFormat.format(moment)} ${timeOfDay(at)}`;
}

/* The browser's own zone, in which all times are told. */
export function zoneName() {
  const offset = zoneFormat.formatToParts(new Date()).find((part) => part.type === "timeZoneName").value.replace("GMT", "UTC");
  const { timeZone } = zoneFormat.resolvedOptions();
  return timeZone && timeZone !== offset ? `${offset}, ${timeZone}` : offset;
}

export const parseTime = (text) => (text ? Date.parse(text) / 1000 : null);
export const several = (count, what) => (count === 1 ? `1 ${what}` : `${count} ${what}es`);

export function roleName(process) {
  return (process.roles || [process.role]).map((role) => ROLES[role] || role).join(" + ");
}

/* Only a plain word gets a capital letter: an identifier (api_server, bench-1, worker dp0) stays as it is written. */
const PLAIN_LETTER = /^[a-z](?=[a-z']*([ ,;:]|\.?$))(?!\w+ dp\d)/;
export const sentence = (text) => `${text.replace(PLAIN_LETTER, (letter) => letter.toUpperCase())}${text.endsWith(".") ? "" : "."}`;

/* An operation while it goes on, and once it has been done. */
export const OPERATIONS = {
  freeze: ["Entering a freeze", "Freeze entered"], budget: ["Entering a budget", "Budget entered"],
  maintain: ["Maintenance", "Maintenance done"], restore: ["Restoring normal GC", "Normal GC restored"],
  lease: ["Renewing the lease", "Lease renewed"],
};
