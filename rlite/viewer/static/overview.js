// Overview: what the run is and how far it has come, advice, figures with their trend, and curves by importance.

import { ask, series } from "viewer/api";
import { lineChart, renewCharts, stackChart } from "viewer/charts";
import { evaluationCards } from "viewer/evaluation";
import { colorOfMetric, colorOfRun, colorOfWork, DASHES, STATUS } from "viewer/colors";
import { arrange, card, compact, discard, empty, fill, groupedBy, h, number, seconds, select, svg, update, words } from "viewer/dom";
import { masthead } from "viewer/masthead";

// title, metrics, note; the charts that have no data are left out
const HEALTH = [
  ["KL", ["kl"], "to the reference model"],
  ["Entropy", ["entropy"], "nats per token"],
  ["Clipped", ["clip_fraction"], "share of tokens whose ratio was clipped"],
  ["Groups without signal", ["uniform_groups"], "share of groups whose rewards are all equal"],
  ["Response length", ["response_length", "response_length_p95"], "tokens: mean, and 95th percentile"],
  ["Truncated answers", ["truncated"], "share that reached a limit"],
  ["Drift", ["logprob_drift"], "mean |log p(trainer) − log p(engine)| per token"],
  ["Gradient norm", ["grad_norm"], ""],
  ["Load of experts", ["moe/load_max", "moe/load_min"], "largest and smallest in any layer, in even loads"],
  ["Experts without tokens", ["moe/idle_share", "moe/dropped_share"], "share: in one batch; in 20 optimizer steps (dropped)"],
  ["Auxiliary loss", ["moe/auxiliary_loss"], "without its factor; 1 is an even load"],
  ["Replayed choices", ["moe/replay_differs"], "share that the policy would not repeat"],
];
const LEARNING = [
  ["Reward margin", ["margin"], "chosen minus rejected, mean"],
  ["Loss", ["loss"], ""],
];
const SPEED = [
  ["Tokens per second", ["tokens_per_second"], ""],
  ["Staleness", ["rollout/staleness"], "updates between a token and its use"],
];
const PARTS = { learning: "Does it learn?", health: "Is it healthy?", speed: "Where do time and rollouts go?", more: "Metrics that you chose" };
const EXPERT = /^moe\/load\/(\d+)$/;
const MOST_EXPERTS = 16; // lines in the chart of experts
const EVALUATED = /(^|\/)(test_)?accuracy$/;
const HELD_OUT_LOSS = /(^|\/)test_loss$/;
const WINDOW = 10; // steps whose mean a figure is
const SMOOTH = [["0", "none"], ["0.6", "a little"], ["0.85", "much"], ["0.95", "very much"]];
const CLOCKS = { step: "step", tokens: "tokens", time: "time" };
const FAMILIES = { grpo: "ppo" }; // presets whose curves mean the same

export async function render(parameters, app) {
  const view = new Overview(parameters, app);
  await view.draw();
  return { body: view.body, renew: () => view.draw().catch(() => {}), tick: () => view.drawHeads() };
}

const listed = (text) => (text ?? "").split(",").filter(Boolean);

// What the reader chose is in the address: `more` metrics, hidden charts, their order, those with a logarithmic axis,
// the smoothing, and what the x axis counts.
class Overview {
  constructor(parameters, app) {
    Object.assign(this, { app, parameters: { ...parameters } });
    const part = () => h("div", { class: "contents" });
    this.parts = { problems: part(), heads: h("div", { class: "mastheads" }), results: part(), advice: part(), tiles: part(), tools: part() };
    this.grids = Object.fromEntries(Object.entries(PARTS).map(([name, title]) => [name, { head: h("h2", { class: "part", hidden: true }, title), grid: h("div", { class: "charts" }) }]));
    this.parts.empty = part();
    this.parts.metrics = part();
    const { empty: none, metrics, ...above } = this.parts;
    this.body = h("div", { class: "page" }, Object.values(above), Object.values(this.grids).map(({ head, grid }) => [head, grid]), none, metrics);
    this.metrics = metricsCard(app, () => listed(this.parameters.more), (more) => this.set({ more: more.join(",") }));
  }

  async draw() {
    this.all = await found(this.app, listed(this.parameters.more));
    this.drawParts();
  }

  // Draws again with other choices. The focus stays on what was pressed.
  async set(changes) {
    Object.assign(this.parameters, changes);
    this.app.keep("overview", this.parameters);
    const { chart } = document.activeElement?.closest("[data-chart]")?.dataset ?? {};
    if ("more" in changes) await this.draw();
    else this.drawParts();
    if (!chart || document.activeElement !== document.body) return;
    (this.body.querySelector(`[data-chart="${CSS.escape(chart)}"] summary`) ?? this.hidden.lastElementChild)?.focus();
  }

  // Draws what is new. Charts and the list of metrics stay, with what the reader chose in them.
  drawParts() {
    const { parts, app, all } = this;
    const [evaluated, trained] = [all.filter((each) => each.results), all.filter((each) => !each.results)];
    update(parts.problems, all.map((each) => problems(each.run)));
    this.drawHeads();
    const results = JSON.stringify(evaluated.map(({ run, results, statuses }) => [run.name, results, statuses]));
    if (results !== parts.known) fill(parts.results, evaluated.map((each) => evaluationCards(each, app)));
    parts.known = results;
    update(parts.advice, trained.length > 0 && h("div", { class: "advices" }, advice(trained, app)));
    update(parts.tiles, trained.map((each) => tiles(each, trained.length > 1, app)));
    const steps = trained.filter((each) => !each.run.is_unfinished_evaluation); // runs that have them
    const charts = steps.length ? this.charts(steps) : {};
    for (const [name, { head, grid }] of Object.entries(this.grids)) {
      const own = this.arranged(charts[name] ?? []);
      head.hidden = !own.length;
      if (name === "speed") head.textContent = steps.some(({ sources }) => sources.train) ? PARTS.speed : "Where does the time go?";
      renewCharts(grid, own);
    }
    const curves = Object.values(charts).flat();
    if (curves.length) this.drawTools(curves);
    else fill(parts.tools);
    update(parts.empty, withoutCurves(trained, steps, curves));
    arrange(parts.metrics, steps.length > 0 && this.metrics.renew() ? [this.metrics.card] : []);
  }

  // Whether a run is under way depends on the clock, too.
  drawHeads() {
    update(this.parts.heads, this.all.map((each) => masthead(each.run, { ...each, several: this.all.length > 1 })));
  }

  // Charts of a part in the reader's order, without those that are hidden.
  arranged(charts) {
    const [order, hidden] = [listed(this.parameters.order), listed(this.parameters.hidden)];
    const place = ({ dataset }) => (order.indexOf(slug(dataset.chart)) + 1 || order.length + 1);
    const isHidden = ({ dataset }) => hidden.includes(slug(dataset.chart));
    charts.filter(isHidden).forEach(discard);
    return charts.filter((chart) => !isHidden(chart)).sort((a, b) => place(a) - place(b));
  }

  // The choices for all charts. They are drawn once, and only what they list is drawn anew.
  drawTools(curves) {
    const { smooth = "0", x = "step" } = this.parameters;
    const hidden = curves.map(({ dataset }) => dataset.chart).filter((title) => listed(this.parameters.hidden).includes(slug(title)));
    if (!this.tools) {
      this.tools = h("div", { class: "toolbar" },
        select("smoothing", SMOOTH, smooth, (value) => this.set({ smooth: value === "0" ? "" : value })),
        select("over", Object.entries(CLOCKS), x, (value) => this.set({ x: value === "step" ? "" : value })),
        this.hidden = h("span", { class: "chips" }), h("small", {}, "Drag to zoom, double click to see all. The address keeps these choices."));
      fill(this.parts.tools, this.tools);
    }
    const show = (title) => this.set({ hidden: listed(this.parameters.hidden).filter((name) => name !== slug(title)).join(",") });
    fill(this.hidden, hidden.map((title) => h("button", { type: "button", class: "chip", on: { click: () => show(title) } }, `show ${title}`)));
  }

  // What a reader may do with one chart.
  menu(title, hasLog) {
    const toggle = (name) => {
      const before = listed(this.parameters[name]);
      return this.set({ [name]: (before.includes(slug(title)) ? before.filter((other) => other !== slug(title)) : [...before, slug(title)]).join(",") });
    };
    const act = (text, click) => h("button", { type: "button", class: "quiet", on: { click } }, text);
    const close = ({ currentTarget, relatedTarget }) => { if (!currentTarget.contains(relatedTarget)) currentTarget.open = false; };
    return h("details", { class: "menu", on: { focusout: close } }, h("summary", { "aria-label": `choices for ${title}`, title: "logarithmic axis, order, hide" }, "⋯"),
      h("div", {}, hasLog && act("logarithmic or linear", () => toggle("log")), act("move to the front", () => this.move(title, -Infinity)), act("move back by one", () => this.move(title, 1)), act("move forward by one", () => this.move(title, -1)), act("hide", () => toggle("hidden"))));
  }

  move(title, by) {
    const { grid } = Object.values(this.grids).find((each) => [...each.grid.children].some(({ dataset }) => dataset.chart === title));
    const names = [...grid.children].map(({ dataset }) => slug(dataset.chart));
    const from = names.indexOf(slug(title));
    names.splice(Math.max(0, Math.min(names.length - 1, from + by)), 0, ...names.splice(from, 1));
    this.set({ order: [...listed(this.parameters.order).filter((name) => !names.includes(name)), ...names].join(",") });
  }

  // The curves of runs that train, by importance. Runs of different trainers have panels of their own.
  charts(found) {
    const families = [...groupedBy(found, ({ run }) => familyOf(run)).entries()];
    const title = (family, own) => [...new Set(own.map(({ run }) => run.begun.trainer || family))].join(", ");
    const all = families.map(([family, own]) => this.chartsOf(own, families.length > 1 ? ` · ${title(family, own)}` : ""));
    return Object.fromEntries(Object.keys(PARTS).map((name) => [name, all.flatMap((each) => each[name]).filter(Boolean)]));
  }

  chartsOf(found, suffix) {
    const several = found.length > 1;
    const line = (title, lines, options = {}) => this.lines(title + suffix, lines, options);
    const metric = ([title, metrics, note]) => line(title, metricLines(metrics, found), { note });
    const stack = (each, title, [steps, layers, options]) => stackChart(several ? `${title}: ${each.run.name}` : title + suffix, steps, layers, { ...options, menu: this.menu(several ? `${title}: ${each.run.name}` : title + suffix, false) });
    return {
      learning: [
        line("Training reward", rewardLines(found), { note: "mean of each step; the band is its standard error, clustered by prompt" }),
        line("Parts of the reward", partLines(found), { note: "mean of each part, before its weight" }),
        line("Held out", heldOutLines(found), { note: "evaluations; the bars are standard errors, clustered by prompt", isRare: true }),
        line("Held-out loss", lossLines(found), { isRare: true }),
        line("Training accuracy", metricLines(["accuracy"], found.filter((each) => !isHeldOut("accuracy", each.run))), { note: "share of pairs that the model orders rightly" }),
        ...LEARNING.map(metric),
      ],
      health: [...HEALTH.map(metric), ...found.map((each) => line(several ? `Load per expert: ${each.run.name}` : "Load per expert", ...expertLines(each)))],
      speed: [...SPEED.map(metric), ...found.map((each) => stack(each, "Seconds per phase", phaseLayers(each))), ...found.map((each) => stack(each, "Rollouts by status", statusLayers(each)))],
      more: listed(this.parameters.more).map((name) => metric([name, [name], ""])),
    };
  }

  // A chart over what the reader chose. The few points of evaluations are not smoothed.
  lines(title, lines, { isRare = false, ...options }) {
    const { smooth, x = "step" } = this.parameters;
    const clocks = lines.map(({ each }) => clockOf(each, x));
    const moved = lines.map(({ each: _, ...own }, index) => ({ ...own, steps: own.steps.map(clocks[index]) }));
    const axis = { step: "step", tokens: "tokens trained on", time: "hours" }[x] ?? "step";
    return lineChart(title, moved, { ...options, axis, smooth: isRare ? 0 : Number(smooth) || 0, log: listed(this.parameters.log).includes(slug(title)), menu: this.menu(title, true) });
  }
}

const slug = (title) => title.replaceAll(",", " ");

// The trainer of a run. A run of an earlier version does not name it; then its metrics tell runs of different kinds apart.
function familyOf({ begun, metrics }) {
  if (begun.trainer) return FAMILIES[begun.trainer] ?? begun.trainer;
  return metrics.includes("reward") ? "ppo" : metrics.includes("margin") ? "preferences" : "supervised";
}

// A function from steps to what the x axis counts: up to a step, tokens that were trained on, or hours.
function clockOf({ clock }, x) {
  const sums = { tokens: clock.tokens, time: clock.seconds.map((value) => value / 3600) }[x];
  if (!sums) return (step) => step;
  const at = (step) => {
    let [low, high] = [0, clock.steps.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (clock.steps[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };
  return (step) => sums[at(step)] ?? 0;
}

async function found(app, more) {
  const names = (run) => [...new Set([...[...LEARNING, ...HEALTH, ...SPEED].flatMap(([, metrics]) => metrics), ...more, "reward", "seconds", ...picked(run)])];
  return Promise.all(app.runs.map(async (run, index) => {
    const [own, about, config] = await Promise.all([series(index, names(run).filter((name) => run.metrics.includes(name))), ask("overview", { run: index }), ask("config", { run: index })]);
    return { run, index, color: colorOfRun(index), series: own, config, ...about };
  }));
}

function withoutCurves(trained, steps, curves) {
  if (!trained.length || curves.length) return null;
  return steps.length ? empty("No metrics yet", "The first step of a run writes metrics.jsonl. This page follows the run.")
    : empty("No results yet", "rlite eval writes results.json when every model has answered. This page follows it.");
}

function picked(run) {
  return run.metrics.filter((name) => EVALUATED.test(name) || HELD_OUT_LOSS.test(name) || name.endsWith("standard_error") || name.startsWith("reward/") || EXPERT.test(name));
}

function problems(run) {
  const list = run.problems.map((problem) => h("li", {}, problem));
  return [
    list.length > 0 && h("section", { class: "advice alarm" }, h("strong", {}, `${run.name}: not everything can be shown`), h("ul", {}, list)),
    run.notes.map((note) => h("section", { class: "advice information" }, h("strong", {}, run.name), h("span", {}, note))),
  ];
}

function advice(found, app) {
  const all = found.flatMap((each) => each.advisories.map((advisory) => ({ ...advisory, name: each.run.name, run: each.index })));
  const titles = [...groupedBy(all, ({ title }) => title)].sort(([, [a]], [, [b]]) => (b.level === "alarm") - (a.level === "alarm"));
  const told = ({ reason, metric, name, run }) => [
    found.length > 1 && h("small", {}, `${name}: `), reason, metric ? null : [" ", h("a", { href: app.link("ledger", { run }) }, "Open the ledger")]];
  return titles.map(([title, own]) =>
    h("section", { class: `advice ${own[0].level}`, role: "status" }, h("strong", {}, title), own.map((advisory) => h(found.length > 1 ? "div" : "span", {}, told(advisory)))));
}

function tiles({ run, index, series: metrics, sources, statuses }, several, app) {
  const total = Object.values(statuses).reduce((a, b) => a + b, 0);
  const lost = total - (statuses.trained ?? 0) - (statuses.evaluated ?? 0);
  const reward = filled(sources.train, metrics.reward);
  const finished = reward && upTo(reward, run.last_step || Infinity);
  const evaluated = evaluations({ run, sources, series: metrics }).map(([name, points]) =>
    tile(`held out: ${name}`, points, { note: `${points.errors?.at(-1) ? `± ${number(points.errors.at(-1), 2)}, ` : ""}${run.is_unfinished_evaluation ? "so far" : `step ${points.steps.at(-1)}`}`, window: 1 }));
  const losses = heldOutLosses(metrics).map(([name, points]) => tile(name ? `held-out loss: ${name}` : "held-out loss", points, { note: `step ${points.steps.at(-1)}`, window: 1 }));
  const facts = [
    tile("reward", finished),
    !sources.train && tile("loss", metrics.loss),
    ...evaluated,
    ...losses,
    tile("response length", metrics.response_length, { unit: " tokens" }),
    tile("entropy", metrics.entropy),
    tile("tokens/s", metrics.tokens_per_second, { show: (value) => compact(Number(value.toPrecision(3))) }),
    tile("step time", metrics.seconds, { show: seconds }),
    total > 0 && h("div", { class: "tile" }, h("span", {}, "rollouts"), h("strong", {}, compact(total)), h("small", {}, "recorded")),
    total > 0 && h("a", { class: "tile", href: app.link("ledger", { run: index }) }, h("span", {}, sources.train ? "not trained on" : "not counted"), h("strong", {}, `${((100 * lost) / total).toFixed(1)} %`), h("small", {}, `${lost ? lostBy(statuses) : "no rollout"}; open the ledger`)),
  ].filter(Boolean);
  const title = several && h("h2", {}, h("i", { class: "dot", style: { background: colorOfRun(index) } }), run.name);
  return facts.length > 0 && h("div", {}, title, h("div", { class: "tiles" }, facts));
}

// The two most frequent fates of rollouts that were not trained on.
function lostBy(statuses) {
  const fates = Object.entries(statuses).filter(([status]) => status !== "trained" && status !== "evaluated").sort(([, a], [, b]) => b - a);
  const rest = fates.slice(2).reduce((sum, [, count]) => sum + count, 0);
  return [...fates.slice(0, 2).map(([status, count]) => `${number(count)} ${words(status)}`), rest && `${number(rest)} other`].filter(Boolean).join(", ");
}

function upTo({ steps, values }, last) {
  const kept = steps.map((step, at) => [step, values[at]]).filter(([step]) => step <= last);
  return { steps: kept.map(([step]) => step), values: kept.map(([, value]) => value) };
}

// A figure: the mean of the last steps, its change, and its course; none if it is not known.
function tile(label, points, { show = (value) => number(value, 3), unit = "", note, window = WINDOW } = {}) {
  const values = (points?.values ?? []).filter((value) => value !== null && value !== undefined);
  if (!values.length) return null;
  const width = Math.max(1, Math.min(window, Math.floor(values.length / 2)));
  const meanOf = (own) => own.reduce((a, b) => a + b, 0) / own.length;
  const now = meanOf(values.slice(-width));
  const before = values.length > width ? meanOf(values.slice(-2 * width, -width)) : null;
  const change = before === null ? null : now - before;
  const isSame = change !== null && Math.abs(change) < 1e-9 + 0.005 * Math.abs(before);
  const told = note ?? (width > 1 ? `last ${width} steps vs the ${width} before` : `step ${points.steps.at(-1)}`);
  const arrow = change === null ? "" : isSame ? "hardly changed" : `${change > 0 ? "▲" : "▼"} ${show(Math.abs(change))}`;
  const since = window === 1 ? "the evaluation before" : `the ${width === 1 ? "step" : `${width} steps`} before`;
  return h("div", { class: "tile" }, h("span", {}, label), h("strong", {}, `${show(now)}`, h("i", {}, unit)),
    arrow && h("b", { class: "change", title: `from ${show(before)}, ${since}`, "aria-label": isSame ? "hardly changed" : `${change > 0 ? "up" : "down"} by ${show(Math.abs(change))} since ${since}` , role: "note" }, arrow),
    h("small", {}, told), spark(values));
}

// The course of all values, as means of at most 40 parts.
function spark(values) {
  if (values.length < 3) return null;
  const number = Math.min(40, values.length);
  const parts = Array.from({ length: number }, (_, at) => values.slice(Math.floor((at * values.length) / number), Math.floor(((at + 1) * values.length) / number)));
  const means = parts.map((own) => own.reduce((a, b) => a + b, 0) / own.length);
  const [low, high] = [Math.min(...means), Math.max(...means)];
  const points = means.map((value, at) => `${((100 * at) / (number - 1)).toFixed(1)},${(high > low ? 20 - (18 * (value - low)) / (high - low) : 11).toFixed(1)}`);
  return svg("svg", { viewBox: "0 0 100 22", class: "course", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }));
}

function label(each, name, found) {
  return found.length > 1 ? `${each.run.name}${name ? ` ${name}` : ""}` : name || each.run.name;
}

// Means of the record, which have errors; at steps that it does not have, those of metrics.jsonl.
function filled(recorded, metric) {
  if (!recorded?.steps.length || !metric) return recorded?.steps.length ? recorded : metric;
  const own = new Set(recorded.steps);
  const points = [recorded, metric].flatMap(({ steps, values, errors }, index) => steps.map((step, at) => ({ step, value: values[at], error: errors?.[at] ?? null, isKept: !index || !own.has(step) })))
    .filter(({ isKept }) => isKept).sort((a, b) => a.step - b.step);
  return { steps: points.map(({ step }) => step), values: points.map(({ value }) => value), errors: points.map(({ error }) => error) };
}

// Lines have the colour of their run if there are several; then its metrics differ by their dashes.
function styled(lines, found) {
  const several = found.length > 1;
  const numbers = new Map();
  return lines.map((line) => {
    const at = numbers.get(line.each) ?? 0;
    numbers.set(line.each, at + 1);
    return { ...line, color: several ? line.each.color : colorOfMetric(at, line.each.color), dash: several ? DASHES[at % DASHES.length] : undefined };
  });
}

function rewardLines(found) {
  const lines = found.map((each) => {
    const points = filled(each.sources.train, each.series.reward);
    return points && { each, label: label(each, "reward", found), ...points };
  });
  return styled(lines.filter(Boolean), found);
}

function partLines(found) {
  return styled(found.flatMap((each) => Object.entries(each.series).filter(([name]) => name.startsWith("reward/")).map(([name, points]) => ({ each, label: label(each, name.slice(7), found), ...points }))), found);
}

function heldOutLines(found) {
  return styled(found.flatMap((each) => evaluations(each).map(([name, points]) => ({ each, label: label(each, name, found), bars: true, ...points }))), found);
}

function lossLines(found) {
  return styled(found.flatMap((each) => heldOutLosses(each.series).map(([name, points]) => ({ each, label: label(each, name || "held-out loss", found), ...points }))), found);
}

// An accuracy of training has no number of failed episodes beside it.
function isHeldOut(name, run) {
  return name.endsWith("test_accuracy") || run.metrics.includes(name.replace(/accuracy$/, "num_errors"));
}

// Means of the record by set, and the metrics of evaluations that are not recorded. The metrics of a single set may have
// no name of it.
function evaluations({ run, sources, series: metrics }) {
  const recorded = new Map(Object.entries(sources).filter(([source]) => source !== "train").map(([source, points]) => [source.slice(5), points]));
  const measured = new Map(Object.entries(metrics).filter(([name]) => EVALUATED.test(name) && isHeldOut(name, run))
    .map(([name, points]) => [setOf(name) || (recorded.size === 1 ? [...recorded.keys()][0] : "accuracy"), { ...points, errors: errorsOf(metrics, name, points) }]));
  return [...new Set([...recorded.keys(), ...measured.keys()])].map((name) => [name, filled(recorded.get(name), measured.get(name))]).filter(([, points]) => points);
}

function heldOutLosses(metrics) {
  return Object.entries(metrics).filter(([name]) => HELD_OUT_LOSS.test(name)).map(([name, points]) => [setOf(name), points]);
}

// The test set of a metric; an empty text if it has no name.
function setOf(name) {
  return name.slice(0, Math.max(0, name.lastIndexOf("/")));
}

function errorsOf(metrics, name, { steps }) {
  const errors = metrics[name.replace(/accuracy$/, "standard_error")];
  const place = new Map((errors?.steps ?? []).map((step, index) => [step, errors.values[index]]));
  return steps.map((step) => place.get(step) ?? null);
}

function metricLines(metrics, found) {
  return styled(found.flatMap((each) => metrics.filter((name) => each.series[name]).map((name) => ({
    each,
    label: label(each, metrics.length > 1 ? name : found.length > 1 ? "" : name, found),
    ...each.series[name],
  }))), found);
}

// The load of each expert, or of those with the largest and the smallest load at the end.
function expertLines(each) {
  const all = Object.entries(each.series).filter(([name]) => EXPERT.test(name))
    .map(([name, points]) => ({ each, label: `expert ${Number(EXPERT.exec(name)[1])}`, ...points, last: points.values.findLast((value) => value !== null) }));
  const cut = Math.max(0, all.length - MOST_EXPERTS);
  const kept = new Set(all.toSorted((a, b) => b.last - a.last).toSpliced(MOST_EXPERTS / 2, cut));
  const note = `mean over layers, in even loads${cut ? `; ${MOST_EXPERTS} of ${all.length} experts: the most and the least loaded` : ""}`;
  return [styled(all.filter((line) => kept.has(line)), [each]), { note }];
}

function phaseLayers(each) {
  const { steps, seconds: phases, stride } = each.phases;
  const layers = Object.entries(phases)
    .map(([label, values]) => ({ label, values, color: colorOfWork(label), total: values.reduce((a, b) => a + b, 0) }))
    .sort((a, b) => b.total - a.total);
  return [steps, layers, { unit: " s", note: stride > 1 ? `by step; means of ${stride} steps each` : "by step" }];
}

function statusLayers(each) {
  const { steps, counts } = each.statuses_by_step;
  const layers = Object.entries(STATUS).filter(([status]) => counts[status]).map(([status, color]) => ({ label: words(status), color, values: counts[status] }));
  return [steps, layers, { note: "every rollout of a step, by what became of it" }];
}

// The metrics of all runs, to choose from.
function metricsCard(app, chosen, choose) {
  const list = h("div", { class: "chips" });
  const search = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", on: { input: () => draw() } });
  let known = [];
  const pick = (event, name) => {
    const isOn = chosen().includes(name);
    event.target.setAttribute("aria-pressed", String(!isOn));
    choose(isOn ? chosen().filter((other) => other !== name) : [...chosen(), name]);
  };
  const draw = () => fill(list, known.filter((name) => name.includes(search.value)).map((name) =>
    h("button", { type: "button", class: "chip", "aria-pressed": String(chosen().includes(name)), on: { click: (event) => pick(event, name) } }, name)));
  const own = card("All metrics", h("p", { class: "note" }, "Choose metrics to draw them above this list."), search, list);
  const renew = () => {
    const next = [...new Set(app.runs.flatMap((run) => run.metrics))].sort();
    const isNew = next.join() !== known.join();
    known = next;
    if (isNew) draw();
    return known.length > 0;
  };
  return { card: own, renew };
}
