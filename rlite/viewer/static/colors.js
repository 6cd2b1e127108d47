// Colours, each of which means one thing on every page: a run, a status, a kind of work, or a value of a scale. They are
// chosen so that also readers with colour blindness tell neighbours apart.

// Runs, in the order in which they were given; models of an evaluation likewise.
export const RUNS = ["#2563eb", "#e8710a", "#0f9d76", "#a855f7", "#d6336c", "#0891b2", "#8d6e1f", "#64748b"];
// Several metrics of one run, after the first, which has the colour of the run.
const METRICS = ["#06b6d4", "#f43f5e", "#65a30d", "#d946ef", "#d97706", "#14b8a6", "#818cf8", "#a8a29e"];
// Line patterns of several metrics of one run.
export const DASHES = [undefined, [7, 4], [2, 3], [11, 3, 2, 3]];
export const STATUS = {
  trained: "#15803d",
  evaluated: "#15803d",
  skipped: "#d6336c",
  filtered: "#94a3b8",
  refused: "#8d6e1f",
  too_old: "#8b5cf6",
  failed: "#dc2626",
  timed_out: "#ca8a04",
  reward_killed: "#c026d3",
  aborted: "#0891b2",
};
export const GOOD = STATUS.trained;
export const BAD = STATUS.failed;
export const NEUTRAL = "#64748b";
// What takes time: phases of a step, spans of the timeline, stages of an episode. The first pattern that a name has
// decides.
const WORK = [
  [/^(queue|wait|held|idle)|: waiting$/, "#94a3b8"],
  [/^group$|short spans$/, "#475569"], // several kinds together
  [/rollout|generat|advance|: running$/, "#0369a1"],
  [/: ready$/, "#3b82f6"],
  [/environment/, "#c2410c"],
  [/reward/, "#4d7c0f"],
  [/evaluat/, "#be185d"],
  [/sync|weights/, "#0f766e"],
  [/reference|logprob|teacher/, "#a16207"],
  [/snapshot|checkpoint|save/, "#78716c"],
  [/update|train|optimizer|backward/, "#7c3aed"],
  [/critic|value/, "#4338ca"],
];
const OTHER_WORK = ["#9f1239", "#1e40af", "#3f6212", "#86198f", "#155e75"];
const LOW = [200, 82, 28];
const HIGH = [28, 100, 190];

export const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

export const colorOfRun = (index) => RUNS[index % RUNS.length];

export const colorOfMetric = (index, run) => (index ? METRICS[(index - 1) % METRICS.length] : run);

export function colorOfWork(name) {
  const known = WORK.find(([pattern]) => pattern.test(name));
  if (known) return known[1];
  let sum = 0;
  for (const letter of name) sum = (31 * sum + letter.codePointAt(0)) % 9973;
  return OTHER_WORK[sum % OTHER_WORK.length];
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mixed(from, to, share) {
  return from.map((value, index) => Math.round(value + share * (to[index] - value)));
}

const rgb = (parts, alpha = 1) => `rgba(${parts.join(",")},${alpha})`;

// From pale at `low` to strong at `high`.
export function scale(value, low, high) {
  if (value === null || value === undefined) return "transparent";
  const [pale, strong] = isDark() ? [[62, 66, 76], [45, 212, 191]] : [[238, 232, 214], [15, 118, 110]];
  const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5;
  return rgb(mixed(pale, strong, share));
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
  const color = METRICS[((index % METRICS.length) + METRICS.length) % METRICS.length];
  return `color-mix(in srgb, ${color} 34%, transparent)`;
}

export function range(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [0, 1];
}
