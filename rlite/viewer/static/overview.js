// Overview: advice first, then the curves of every run.

import { ask, series } from "viewer/api";
import { lineChart, renewCharts, stackChart } from "viewer/charts";
import { evaluationCards } from "viewer/evaluation";
import { SERIES, STATUS } from "viewer/colors";
import { ago, arrange, card, empty, fill, groupedBy, h, newest, number, seconds, update, words } from "viewer/dom";

// title, metrics, note; the charts that have no data are left out
const CHARTS = [
  ["Response length", ["response_length", "response_length_p95"], "tokens: mean, and 95th percentile"],
  ["Truncated answers", ["truncated"], "share that reached a limit"],
  ["Groups without signal", ["uniform_groups"], "share of groups whose rewards are all equal"],
  ["Drift", ["logprob_drift"], "mean |log p(trainer) − log p(engine)| per token"],
  ["Staleness", ["rollout/staleness"], "updates between a token and its use"],
  ["Tokens per second", ["tokens_per_second"], ""],
  ["Loss", ["loss"], ""],
  ["Reward margin", ["margin"], "chosen minus rejected, mean"],
  ["KL", ["kl"], "to the reference model"],
  ["Entropy", ["entropy"], "nats per token"],
  ["Gradient norm", ["grad_norm"], ""],
  ["Load of experts", ["moe/load_max", "moe/load_min"], "largest and smallest in any layer, in even loads"],
  ["Experts without tokens", ["moe/idle_share", "moe/dropped_share"], "share: in one batch; in 20 optimizer steps (dropped)"],
  ["Auxiliary loss", ["moe/auxiliary_loss"], "without its factor; 1 is an even load"],
  ["Replayed choices", ["moe/replay_differs"], "share that the policy would not repeat"],
];
const EXPERT = /^moe\/load\/(\d+)$/;
const MOST_EXPERTS = 16; // lines in the chart of experts
const EVALUATED = /(^|\/)(test_)?accuracy$/;
const HELD_OUT_LOSS = /(^|\/)test_loss$/;
const PHASE_COLORS = ["#2563eb", "#e8710a", "#0f9d76", "#a855f7", "#64748b", "#0891b2", "#8d6e1f", "#d6336c"];

export async function render(parameters, app) {
  const more = (parameters.more ?? "").split(",").filter(Boolean);
  const part = () => h("div", { class: "contents" });
  const parts = { problems: part(), results: part(), advice: part(), tiles: part(), curves: h("div", { class: "charts" }), empty: part(), metrics: part() };
  const metrics = metricsCard(app, more);
  const draw = async () => drawParts({ parts, metrics, all: await found(app, more), app, more });
  const body = h("div", { class: "page" }, Object.values(parts));
  await draw();
  return { body, renew: () => draw().catch(() => {}) };
}

async function found(app, more) {
  const names = (run) => [...new Set([...CHARTS.flatMap(([, metrics]) => metrics), ...more, "reward", "seconds", ...picked(run)])];
  return Promise.all(app.runs.map(async (run, index) => ({
    run,
    index,
    color: SERIES[index % SERIES.length],
    series: await series(index, names(run).filter((name) => run.metrics.includes(name))),
    ...(await ask("overview", { run: index })),
  })));
}

// Draws what is new. Charts and the list of metrics stay, with what the reader chose in them.
function drawParts({ parts, metrics, all, app, more }) {
  const [evaluated, trained] = [all.filter((each) => each.results), all.filter((each) => !each.results)];
  update(parts.problems, all.map((each) => problems(each.run)));
  const results = JSON.stringify(evaluated.map(({ run, results, statuses }) => [run.name, results, statuses]));
  if (results !== parts.known) fill(parts.results, evaluated.map((each) => evaluationCards(each, app)));
  parts.known = results;
  update(parts.advice, trained.length > 0 && h("div", { class: "advices" }, advice(trained, app)));
  update(parts.tiles, trained.map((each) => tiles(each, trained.length > 1, app)));
  const steps = trained.filter((each) => !each.run.is_unfinished_evaluation); // runs that have them
  const curves = steps.length ? chartsOf(steps, more) : [];
  renewCharts(parts.curves, curves);
  update(parts.empty, withoutCurves(trained, steps, curves));
  arrange(parts.metrics, steps.length > 0 && metrics.renew() ? [metrics.card] : []);
}

function withoutCurves(trained, steps, curves) {
  if (!trained.length || curves.length) return null;
  return steps.length ? empty("No metrics yet", "The first step of a run writes metrics.jsonl. This page follows the run.")
    : empty("No results yet", "rlite eval writes results.json when every model has answered. This page follows it.");
}

// The curves of runs that train.
function chartsOf(found, more) {
  const several = found.length > 1;
  return [
    rewardChart(found),
    partsChart(found),
    heldOutChart(found),
    lossChart(found),
    metricChart("Training accuracy", ["accuracy"], "share of pairs that the model orders rightly", found.filter((each) => !isHeldOut("accuracy", each.run))),
    ...CHARTS.map(([title, metrics, note]) => metricChart(title, metrics, note, found)),
    ...found.map((each) => expertsChart(each, several)),
    ...found.map((each) => phaseChart(each, several)),
    ...found.map((each) => statusChart(each, several)),
    ...more.map((name) => metricChart(name, [name], "", found)),
  ].filter(Boolean);
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

function tiles({ run, index, color, series: metrics, sources, statuses }, several, app) {
  const last = (name) => metrics[name]?.values.findLast((value) => value !== null);
  const total = Object.values(statuses).reduce((a, b) => a + b, 0);
  const lost = total - (statuses.trained ?? 0) - (statuses.evaluated ?? 0);
  const evaluated = evaluations({ run, sources, series: metrics }).map(([name, { steps, values, errors }]) =>
    tile(`held out: ${name}`, number(values.at(-1), 3), `${errors?.at(-1) ? `± ${number(errors.at(-1), 2)}, ` : ""}${run.is_unfinished_evaluation ? "so far" : `step ${steps.at(-1)}`}`));
  const losses = heldOutLosses(metrics).map(([name, { steps, values }]) => tile(name ? `held-out loss: ${name}` : "held-out loss", number(values.at(-1), 3), `step ${steps.at(-1)}`));
  const facts = [
    tile("step", number(run.last_step || null), run.changed_at ? `changed ${ago(run.changed_at)}` : ""),
    tile("reward", number(rewardOf(filled(sources.train, metrics.reward), run) ?? last("reward"), 3), "last step"),
    !sources.train && tile("loss", number(last("loss"), 3), "last step"),
    ...evaluated,
    ...losses,
    tile("tokens/s", number(last("tokens_per_second"), 3), "last step"),
    tile("step time", seconds(last("seconds")), "last step"),
    tile("rollouts", number(total || null), "recorded"),
    tile(sources.train ? "not trained on" : "not counted", total ? `${((100 * lost) / total).toFixed(1)} %` : "–", total ? `${number(lost)} rollouts` : "", app.link("ledger", { run: index })),
  ];
  const title = several && h("h2", {}, h("i", { class: "dot", style: { background: color } }), run.name);
  return h("div", {}, title, h("div", { class: "tiles" }, facts.filter(Boolean)));
}

// Mean reward of the newest step.
function rewardOf(points, run) {
  return points?.values[points.steps.indexOf(newest(points.steps, run))];
}

// A figure; none if it is not known.
function tile(label, value, note, href) {
  if (value === "–") return null;
  return h(href ? "a" : "div", { class: "tile", href }, h("span", {}, label), h("strong", {}, value), h("small", {}, note));
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

function rewardChart(found) {
  const lines = found.map((each) => {
    const points = filled(each.sources.train, each.series.reward);
    return points && { label: label(each, "reward", found), color: each.color, ...points };
  });
  return lineChart("Training reward", lines.filter(Boolean), { note: "mean of each step; the band is its standard error, clustered by prompt" });
}

function partsChart(found) {
  const lines = found.flatMap((each) => Object.entries(each.series).filter(([name]) => name.startsWith("reward/")).map(([name, points]) => ({ label: label(each, name.slice(7), found), ...points })));
  return lineChart("Parts of the reward", lines, { note: "mean of each part, before its weight" });
}

function heldOutChart(found) {
  const lines = found.flatMap((each) => evaluations(each).map(([name, points]) => ({ label: label(each, name, found), bars: true, ...points })));
  return lineChart("Held out", lines, { note: "evaluations; the bars are standard errors, clustered by prompt" });
}

function lossChart(found) {
  const lines = found.flatMap((each) => heldOutLosses(each.series).map(([name, points]) => ({ label: label(each, name || "held-out loss", found), ...points })));
  return lineChart("Held-out loss", lines);
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

function metricChart(title, metrics, note, found) {
  const lines = found.flatMap((each) => metrics.filter((name) => each.series[name]).map((name) => ({
    label: label(each, metrics.length > 1 ? name : found.length > 1 ? "" : name, found),
    color: found.length > 1 && metrics.length === 1 ? each.color : undefined,
    ...each.series[name],
  })));
  return lineChart(title, lines, { note });
}

// The load of each expert, or of those with the largest and the smallest load at the end.
function expertsChart(each, several) {
  const all = Object.entries(each.series).filter(([name]) => EXPERT.test(name))
    .map(([name, points]) => ({ label: `expert ${Number(EXPERT.exec(name)[1])}`, ...points, last: points.values.findLast((value) => value !== null) }));
  const cut = Math.max(0, all.length - MOST_EXPERTS);
  const kept = new Set(all.toSorted((a, b) => b.last - a.last).toSpliced(MOST_EXPERTS / 2, cut));
  const note = `mean over layers, in even loads${cut ? `; ${MOST_EXPERTS} of ${all.length} experts: the most and the least loaded` : ""}`;
  return lineChart(several ? `Load per expert: ${each.run.name}` : "Load per expert", all.filter((line) => kept.has(line)), { note });
}

function phaseChart(each, several) {
  const { steps, seconds: phases, stride } = each.phases;
  const layers = Object.entries(phases)
    .map(([label, values]) => ({ label, values, total: values.reduce((a, b) => a + b, 0) }))
    .sort((a, b) => b.total - a.total)
    .map((layer, index) => ({ ...layer, color: PHASE_COLORS[index % PHASE_COLORS.length] }));
  const note = stride > 1 ? `means of ${stride} steps each` : "";
  return stackChart(several ? `Seconds per phase: ${each.run.name}` : "Seconds per phase", steps, layers, { unit: " s", note });
}

function statusChart(each, several) {
  const { steps, counts } = each.statuses_by_step;
  const layers = Object.entries(STATUS).filter(([status]) => counts[status]).map(([status, color]) => ({ label: words(status), color, values: counts[status] }));
  const note = "every rollout of a step, by what became of it";
  return stackChart(several ? `Rollouts: ${each.run.name}` : "Rollouts by status", steps, layers, { note });
}

// The metrics of all runs, to choose from.
function metricsCard(app, more) {
  const list = h("div", { class: "chips" });
  const search = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", on: { input: () => draw() } });
  let known = [];
  const draw = () => fill(list, known.filter((name) => name.includes(search.value)).map((name) => {
    const isOn = more.includes(name);
    const next = isOn ? more.filter((other) => other !== name) : [...more, name];
    return h("button", { type: "button", class: "chip", "aria-pressed": String(isOn), on: { click: () => app.go("overview", { more: next.join(",") }, { replace: true }) } }, name);
  }));
  const own = card("All metrics", h("p", { class: "note" }, "Choose metrics to draw them above."), search, list);
  const renew = () => {
    const next = [...new Set(app.runs.flatMap((run) => run.metrics))].sort();
    const isNew = next.join() !== known.join();
    known = next;
    if (isNew) draw();
    return known.length > 0;
  };
  return { card: own, renew };
}
