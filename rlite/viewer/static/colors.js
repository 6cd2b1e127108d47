// Colours that also readers with colour blindness tell apart.

export const SERIES = ["#2563eb", "#e8710a", "#0f9d76", "#a855f7", "#d6336c", "#0891b2", "#8d6e1f", "#64748b"];
export const STATUS = {
  trained: "#2563eb",
  evaluated: "#2563eb",
  skipped: "#d6336c",
  filtered: "#94a3b8",
  refused: "#8d6e1f",
  too_old: "#8b5cf6",
  failed: "#dc2626",
  timed_out: "#e8710a",
  reward_killed: "#c026d3",
  aborted: "#0891b2",
};
const LOW = [200, 82, 28];
const HIGH = [28, 100, 190];

const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mixed(from, to, share) {
  return from.map((value, index) => Math.round(value + share * (to[index] - value)));
}

const rgb = (parts, alpha = 1) => `rgba(${parts.join(",")},${alpha})`;

// From orange at `low` over a neutral middle to blue at `high`.
export function scale(value, low, high) {
  if (value === null || value === undefined) return "transparent";
  const middle = isDark() ? [78, 82, 92] : [236, 228, 208];
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5;
  return rgb(share < 0.5 ? mixed(LOW, middle, 2 * share) : mixed(middle, HIGH, 2 * share - 1));
}

// Orange below zero, blue above, stronger with distance.
export function diverging(value, size) {
  if (value === null || value === undefined || !size) return "transparent";
  return rgb(value < 0 ? LOW : HIGH, 0.62 * Math.min(1, Math.abs(value) / size));
}

// Nothing at zero, orange at `size`.
export function intensity(value, size) {
  return diverging(value === null || value === undefined ? null : -Math.abs(value), size);
}

export function category(index) {
  const color = SERIES[((index % SERIES.length) + SERIES.length) % SERIES.length];
  return `color-mix(in srgb, ${color} 34%, transparent)`;
}

export function range(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [0, 1];
}
