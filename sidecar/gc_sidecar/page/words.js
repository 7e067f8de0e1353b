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
export const clockTime = (at) => (at ? timeFormat.format(new Date(at * 1000)) : "–");
export const parseTime = (text) => (text ? Date.parse(text) / 1000 : null);
export const several = (count, what) => (count === 1 ? `1 ${what}` : `${count} ${what}es`);

export function roleName(process) {
  return (process.roles || [process.role]).map((role) => ROLES[role] || role).join(" + ");
}

export const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
