// Results of `rlite eval`: the metrics of each model, pass@k, and the difference of two models.

import { lineChart } from "viewer/charts";
import { BAD, colorOfRun, GOOD, NEUTRAL } from "viewer/colors";
import { card, h, key, number, scroller, svg } from "viewer/dom";
import { statusChip } from "viewer/place";

const PASS = /^pass@(\d+)$/;
const MAIN = ["accuracy", "pass@1"];

export function evaluationCards({ run, results, statuses }, app) {
  const models = Object.entries(results.models).map(([name, metrics], index) => ({ name, metrics, color: colorOfRun(index) }));
  const counts = Object.entries(statuses).map(([status, count]) => h("span", {}, statusChip(status), ` ${number(count)}`));
  return [
    h("p", { class: "toolbar" }, h("strong", {}, run.name), counts),
    h("div", { class: "charts results" }, [mainBars(models), passChart(models), differenceCard(results)].filter(Boolean)),
    metricsTable(models),
    differentPrompts(results, app),
  ];
}

// The first metric that all models have, with standard errors.
function mainBars(models) {
  const names = Object.keys(models[0].metrics);
  const chosen = [...MAIN, ...names].find((name) => models.every(({ metrics }) => typeof metrics[name] === "number"));
  if (!chosen) return null;
  const known = models.map((model) => ({ ...model, value: model.metrics[chosen], error: chosen === "accuracy" ? model.metrics.standard_error ?? 0 : 0 }));
  const most = Math.max(1e-9, ...known.map(({ value, error }) => value + error));
  const top = chosen === "accuracy" || PASS.test(chosen) ? Math.max(1, most) : most;
  const rows = known.map(({ name, value, error, color }) => [
    h("dt", { title: name }, name),
    h("dd", {}, bar(value / top, error / top, color), h("span", { class: "value" }, `${number(value, 3)}${error ? ` ± ${number(error, 2)}` : ""}`))]);
  const note = chosen === "accuracy" ? "mean score; the whiskers are standard errors, clustered by prompt" : "of each model";
  return h("section", { class: "card", data: { chart: chosen } }, h("h2", {}, chosen[0].toUpperCase() + chosen.slice(1)), h("p", { class: "note" }, note), h("dl", { class: "bars models" }, rows));
}

function bar(share, error, color) {
  const [low, high] = [Math.max(0, share - error), Math.min(1, share + error)];
  const line = (x1, y1, x2, y2) => svg("line", { x1: `${100 * x1}%`, x2: `${100 * x2}%`, y1, y2 });
  return svg("svg", { class: "model", role: "presentation" },
    svg("rect", { class: "all", width: "100%", height: 16, y: 2, rx: 3 }), svg("rect", { width: `${100 * Math.max(0, share)}%`, height: 16, y: 2, rx: 3, fill: color }),
    error > 0 && [line(low, 10, high, 10), line(low, 6, low, 14), line(high, 6, high, 14)]);
}

function passChart(models) {
  const lines = models.map(({ name, metrics, color }) => {
    const known = Object.entries(metrics).filter(([metric]) => PASS.test(metric)).map(([metric, value]) => [Number(PASS.exec(metric)[1]), value]).sort(([a], [b]) => a - b);
    return { label: name, color, steps: known.map(([k]) => k), values: known.map(([, value]) => value) };
  });
  if (!lines.some(({ steps }) => steps.length > 1)) return null;
  return lineChart("pass@k", lines, { note: "share of prompts with a right answer among k", axis: "k" });
}

function differenceCard({ comparison, no_comparison: reason }) {
  if (!comparison) return reason ? card("Difference", h("p", { class: "note" }, reason)) : null;
  const { first, second, difference, low, high, confidence, p_value: p, num_items: items, better, worse, lower_is_better: lower } = comparison;
  const sign = difference > 0 ? "+" : "";
  const amount = h("span", { class: "big" }, `${sign}${number(difference, 3)}`);
  const counts = `Of ${number(items)} prompt${items === 1 ? "" : "s"}, ${number(better)} went better and ${number(worse)} worse.`;
  if (low === null || high === null) {
    return card("Difference", h("p", { class: "note" }, `${second} − ${first}`), h("p", { class: "headline" }, amount), h("p", { class: "note" }, `A comparison of one prompt has no interval. ${counts}`));
  }
  const size = Math.max(Math.abs(low), Math.abs(high), Math.abs(difference), 0.01) * 1.15;
  const at = (value) => 150 + (140 * value) / size;
  const isShown = p < 1 - (confidence ?? 0.95);  // the test decides; intervals of earlier versions were too narrow
  const isBetter = isShown && difference > 0 !== Boolean(lower), isWorse = isShown && !isBetter;
  const color = isBetter ? GOOD : isWorse ? BAD : NEUTRAL;
  const picture = svg("svg", { viewBox: "0 0 300 56", class: "interval", role: "img", "aria-label": `difference ${number(difference, 3)}, from ${number(low, 3)} to ${number(high, 3)}` },
    svg("line", { x1: 150, x2: 150, y1: 4, y2: 38, class: "zero" }), svg("text", { x: 150, y: 52, "text-anchor": "middle" }, "0"),
    svg("text", { x: 10, y: 52 }, number(-size, 2)), svg("text", { x: 290, y: 52, "text-anchor": "end" }, number(size, 2)),
    svg("line", { x1: at(low), x2: at(high), y1: 21, y2: 21, stroke: color, "stroke-width": 4, "stroke-linecap": "round" }), svg("circle", { cx: at(difference), cy: 21, r: 6, fill: color }));
  const told = isBetter ? `${second} is better.` : isWorse ? `${first} is better.` : "The models may be equally good.";
  return card("Difference", h("p", { class: "note" }, `${second} − ${first}, with its ${Math.round(100 * (confidence ?? 0.95))} % interval`),
    h("p", { class: "headline" }, amount, h("small", {}, `${number(low, 3)} to ${number(high, 3)}, p = ${number(p, 2)}`)), picture,
    h("p", { class: "note" }, `${told} ${counts}`));
}

function metricsTable(models) {
  const names = [...new Set(models.flatMap(({ metrics }) => Object.keys(metrics)))];
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), models.map(({ metrics }) => h("td", { class: "number" }, number(metrics[name])))));
  const head = h("tr", {}, h("th", {}, "metric"), models.map(({ name, color }) => h("th", { class: "number" }, key(color, name))));
  return card("Metrics", scroller("metrics of the models", { class: "scroll whole" }, h("table", { class: "narrow metrics" }, h("thead", {}, head), h("tbody", {}, rows))));
}

function differentPrompts({ comparison, different }, app) {
  if (!comparison || !different.length) return null;
  const rows = different.map(({ set, item, prompt, first, second }) => h("tr", {},
    h("td", { class: "why" }, h("a", { href: app.link("compare", { set, item }), dir: "auto" }, prompt || item)),
    [first, second, second - first].map((value) => h("td", { class: "number" }, number(value, 3)))));
  const head = h("tr", {}, h("th", {}, "prompt"), [comparison.first, comparison.second, "difference"].map((name) => h("th", { class: "number" }, name)));
  return card("Prompts that differ most", scroller("prompts that differ most", { class: "scroll whole" }, h("table", {}, h("thead", {}, head), h("tbody", {}, rows))));
}
