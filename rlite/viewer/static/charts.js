// Charts over steps, drawn by uPlot: lines with error bars or bands, and stacks. Each has its values as a table.

import { colorOfRun, css, isDark } from "viewer/colors";
import { arrange, compact, discard, fill, h, number, whenDiscarded } from "viewer/dom";

const HEIGHT = 190;
const MANY = 80; // steps beyond which a stack has no gaps between its bars
const WHISKERS = 40; // points up to which errors are drawn as bars
const MAX_LISTED = 200; // rows of the table of a chart

// lines: [{label, steps, values, errors, color, dash}]
//
// `smooth` is the weight of the past in a moving average, which is drawn over the pale values; `log` makes a logarithmic
// axis, on which values of 0 and below have no place; `menu` is what a reader may do with the chart.
export function lineChart(title, lines, { note = "", unit = "", axis = "step", smooth = 0, log = false, menu = null } = {}) {
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  if (!shown.length) return null;
  const steps = joined(shown);
  const raw = shown.map((line) => spread(steps, line.steps, line.values).map((value) => (log && !(value > 0) ? null : value)));
  const isCut = log && shown.some((line) => line.values.some((value) => value !== null && value <= 0));
  const content = {
    data: [steps, ...raw.map((values) => (smooth ? smoothed(values, smooth) : values))],
    raw: smooth ? raw : null,
    values: raw,
    errors: shown.map((line) => line.errors && spread(steps, line.steps, line.errors)),
    lines: shown,
    note: [note, isCut && "values of 0 and below have no place on this axis"].filter(Boolean).join("; "),
  };
  const series = shown.map((line, index) => ({
    label: line.label,
    stroke: line.color ?? colorOfRun(index),
    width: 1.75,
    dash: line.dash,
    spanGaps: true,
    points: { show: () => !smooth && content.lines[index].steps.length <= WHISKERS, size: 5, fill: line.color ?? colorOfRun(index) },
    value: (plot, value, own, at) => {
      const place = at ?? lastKnown(plot.data[own]);
      const isEarlier = place !== at && place >= 0 && place < content.data[0].length - 1; // than the place that the legend names
      return `${told(plot.data[own][place], smooth ? null : content.errors[own - 1]?.[place], unit)}${isEarlier ? ` at ${number(content.data[0][place])}` : ""}`;
    },
  }));
  const x = { time: false, range: (plot, low, high) => (content.data[0].length === 1 ? [content.data[0][0] - 1, content.data[0][0] + 1] : [low, high]) };
  const y = { distr: log ? 3 : 1, range: (plot) => reach(plot, content, log) };
  return new Chart(title, content, series, { axis, scales: { x, y }, smooth, log, menu, unit, hooks: { drawAxes: [(plot) => drawErrors(plot, content), (plot) => drawRaw(plot, content)] } }).section;
}

// The moving average of values, as if nothing had been before the first.
function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// layers: [{label, values, color}], one value for each step
export function stackChart(title, steps, layers, { note = "", unit = "", menu = null } = {}) {
  if (!steps.length || !layers.length) return null;
  const sums = [];
  layers.forEach((layer, index) => sums.push(layer.values.map((value, at) => (value ?? 0) + (index ? sums[index - 1][at] : 0))));
  const order = layers.map((_, index) => layers.length - 1 - index); // the highest sum first, the next is drawn over it
  const content = { data: [steps, ...order.map((index) => sums[index])], values: order.map((index) => layers[index].values), layers, note };
  const [whole, bars] = [uPlot.paths.stepped({ align: 1 }), uPlot.paths.bars({ size: [0.86, 60] })];
  const series = order.map((index) => ({
    label: layers[index].label,
    stroke: layers[index].color,
    fill: layers[index].color,
    width: 0,
    paths: (...given) => (content.data[0].length > MANY ? whole : bars)(...given),
    points: { show: false },
    value: (plot, value, own, at) => told(content.layers[index].values[at ?? content.data[0].length - 1], null, unit),
  }));
  const scales = { x: { time: false, range: (_, low, high) => (content.data[0].length === 1 ? [content.data[0][0] - 0.5, content.data[0][0] + 0.5] : [low - 0.5, high + 0.5]) }, y: { range: (_, low, high) => [0, high || 1] } };
  return new Chart(title, content, series, { scales, padding: 0.5, menu, unit }).section;
}

const charts = new WeakMap(); // by their sections

// Puts charts into a grid. A chart that is there already gets the new values, and keeps its zoom and its hidden lines.
export function renewCharts(grid, sections) {
  const before = new Map([...grid.children].map((section) => [section.dataset.chart, charts.get(section)]));
  arrange(grid, sections.map((section) => {
    const [old, made] = [before.get(section.dataset.chart), charts.get(section)];
    if (!old || !made) return section;
    if (old.lines !== made.lines) {
      made.inherit(old);
      return section;
    }
    old.renew(made.content);
    discard(section);
    return old.section;
  }));
}

// A card with a plot, whose functions read `content`.
class Chart {
  constructor(title, content, series, { axis = "step", scales, hooks = {}, padding = 0, smooth = 0, log = false, menu = null, unit = "" }) {
    Object.assign(this, { title, content, padding, axis, unit, plot: null, zoom: null });
    this.labels = series.map(({ label }) => label);
    this.lines = JSON.stringify([axis, smooth > 0, log, series.map(({ label, stroke, dash }) => [label, stroke, dash])]);
    const look = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: css("--chart-font") };
    const atX = axis === "step" || axis === "k" ? (tick) => (Number.isInteger(tick) && tick >= 0 ? compact(tick) : "") : compact;
    this.options = {
      width: 400,
      height: HEIGHT,
      scales,
      hooks: { ...hooks, ready: [(plot) => reachable(plot, title)] },
      series: [{ label: axis, value: (plot, value) => number(value ?? plot.data[0].at(-1)) }, ...series],
      axes: [
        { ...look, size: 28, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : atX(tick))) },
        { ...look, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) },
      ],
      cursor: { sync: { key: `${axis}s` }, points: { size: 6 } },
      legend: { live: true },
    };
    this.box = h("div", { class: "chart" });
    this.note = h("p", { class: "note", hidden: !content.note }, content.note);
    this.list = h("details", { class: "values", on: { toggle: () => this.tabulate() } }, h("summary", {}, "Values"), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `values of ${title}` }));
    this.section = h("section", { class: "card", data: { chart: title } }, h("div", { class: "charthead" }, h("h2", {}, title), menu), this.note, this.box, this.list);
    charts.set(this.section, this);
    // a plot needs its width, which is known once its box is in the document
    const observer = new ResizeObserver(([{ contentRect: { width } }]) => width && this.draw(width));
    observer.observe(this.box);
    whenDiscarded(this.section, () => {
      observer.disconnect();
      this.plot?.destroy();
    });
  }

  // What the picture shows, for those who do not see it.
  tabulate() {
    if (!this.list.open) return;
    const { data: [steps], values, errors } = this.content;
    const stride = Math.ceil(steps.length / MAX_LISTED);
    const places = steps.map((_, at) => at).filter((at) => (steps.length - 1 - at) % stride === 0).reverse();
    const cell = (own, at) => h("td", { class: "number" }, told(own[0][at], own[1]?.[at], this.unit));
    const rows = places.map((at) => h("tr", {}, h("th", { scope: "row" }, number(steps[at])), values.map((own, index) => cell([own, errors?.[index]], at))));
    const head = h("tr", {}, [this.axis, ...this.labels].map((label) => h("th", { scope: "col" }, label)));
    fill(this.list.lastElementChild, stride > 1 && h("p", { class: "note" }, `every ${number(stride)}th step, the newest first`), h("table", { class: "narrow" }, h("thead", {}, head), h("tbody", {}, rows)));
  }

  draw(width) {
    if (this.plot) {
      this.plot.setSize({ width, height: HEIGHT });
      return;
    }
    this.plot = new uPlot({ ...this.options, width }, this.content.data, this.box);
    if (this.zoom) this.plot.setScale("x", this.zoom);
  }

  // The chosen range of steps; null if the chart shows all. A range that was chosen in another chart may be wider than the
  // steps of this one.
  get chosen() {
    if (!this.plot) return this.zoom;
    const { min, max } = this.plot.scales.x;
    const [low, high] = this.options.scales.x.range(this.plot, this.content.data[0][0], this.content.data[0].at(-1));
    return min !== low || max !== high ? { min: min + this.padding, max: max - this.padding } : null;
  }

  renew(content) {
    const zoom = this.chosen;
    Object.assign(this.content, content);
    this.note.textContent = content.note;
    this.note.hidden = !content.note;
    this.plot?.setData(content.data);
    this.tabulate();
    if (zoom) this.plot?.setScale("x", zoom);
  }

  // What the reader chose in a chart that had other lines.
  inherit(old) {
    this.zoom = this.axis === old.axis ? old.chosen : null;
    this.list.open = old.list.open;
    const hidden = new Set((old.plot?.series ?? []).filter(({ show }) => !show).map(({ label }) => label));
    this.options.series.forEach((series) => Object.assign(series, hidden.has(series.label) ? { show: false } : {}));
  }
}

// Lets the keyboard hide and show lines, and names the picture.
function reachable(plot, title) {
  const picture = plot.root.querySelector(".u-wrap");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", `${title}, a chart; its table “Values” has the numbers`);
  plot.root.querySelectorAll(".u-series .u-label").forEach((label, index) => {
    if (!index) return; // the step
    const isShown = () => label.setAttribute("aria-pressed", String(plot.series[index].show));
    Object.entries({ role: "button", tabindex: "0", title: "hide or show" }).forEach(([name, value]) => label.setAttribute(name, value));
    isShown();
    label.closest("th").addEventListener("click", () => setTimeout(isShown));
    label.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      label.closest("th").click();
    });
  });
}

// The range of the values that are in sight, with their errors.
function reach(plot, { data, raw, errors }, log) {
  const [from, to] = plot.series[0].idxs ?? [0, data[0].length - 1];
  let [low, high] = [Infinity, -Infinity];
  for (let line = 1; line < data.length; line += 1) {
    if (!plot.series[line].show) continue;
    for (let at = from; at <= to; at += 1) {
      const value = (raw?.[line - 1] ?? data[line])[at];
      if (value === null) continue;
      const error = errors[line - 1]?.[at] ?? 0;
      low = Math.min(low, log && value <= error ? value : value - error);
      high = Math.max(high, value + error);
    }
  }
  if (log) return low > high ? [0.1, 1] : uPlot.rangeLog(low, high, 10, false);
  if (low === high) return low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1];
  return low > high ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

// The values themselves, pale, under their moving average.
function drawRaw(plot, { data, raw, lines }) {
  if (!raw) return;
  const context = plot.ctx;
  context.save();
  context.beginPath();
  context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  context.clip();
  context.globalAlpha = isDark() ? 0.5 : 0.3;
  context.lineWidth = devicePixelRatio;
  raw.forEach((values, index) => {
    if (!plot.series[index + 1].show) return;
    context.strokeStyle = lines[index].color ?? colorOfRun(index);
    context.beginPath();
    values.forEach((value, at) => value !== null && context.lineTo(plot.valToPos(data[0][at], "x", true), plot.valToPos(value, "y", true)));
    context.stroke();
  });
  context.restore();
}

function drawErrors(plot, { data, raw, errors, lines }) {
  const context = plot.ctx;
  lines.forEach((line, index) => {
    if (!errors[index] || !plot.series[index + 1].show) return;
    const parts = [[]]; // a step without an error ends a part
    data[0].forEach((step, at) => {
      const [value, error] = [(raw?.[index] ?? data[index + 1])[at], errors[index][at]];
      if (value === null) return;
      if (error === null) parts.push([]);
      else parts.at(-1).push({ x: plot.valToPos(step, "x", true), low: plot.valToPos(value - error, "y", true), high: plot.valToPos(value + error, "y", true) });
    });
    context.save();
    context.beginPath();
    context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    context.clip();
    for (const points of parts) (line.bars ? drawBars : drawBand)(context, points, line.color ?? colorOfRun(index));
    context.restore();
  });
}

function drawBars(context, points, color) {
  context.strokeStyle = color;
  context.lineWidth = 1.5 * devicePixelRatio;
  context.beginPath();
  for (const { x, low, high } of points) {
    context.moveTo(x, low);
    context.lineTo(x, high);
  }
  context.stroke();
}

function drawBand(context, points, color) {
  context.fillStyle = color;
  context.globalAlpha = 0.16;
  context.beginPath();
  points.forEach(({ x, high }) => context.lineTo(x, high));
  points.reverse().forEach(({ x, low }) => context.lineTo(x, low));
  context.fill();
}

function joined(lines) {
  return [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
}

function spread(steps, own, values) {
  const place = new Map(own.map((step, index) => [step, values[index]]));
  return steps.map((step) => place.get(step) ?? null);
}

// Without a cursor, the legend has the newest values.
function lastKnown(values) {
  return values.findLastIndex((value) => value !== null && value !== undefined);
}

function told(value, error, unit) {
  if (value === null || value === undefined) return "–";
  return `${number(value)}${unit}${error ? ` ± ${number(error, 2)}` : ""}`;
}
