// Charts over steps, drawn by uPlot: lines with error bars or bands, and stacks.

import { css, SERIES } from "viewer/colors";
import { arrange, discard, h, number, whenDiscarded } from "viewer/dom";

const HEIGHT = 190;
const MANY = 80; // steps beyond which a stack has no gaps between its bars
const WHISKERS = 40; // points up to which errors are drawn as bars

// lines: [{label, steps, values, errors, color, dash}]
export function lineChart(title, lines, { note = "", unit = "", axis = "step" } = {}) {
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  if (!shown.length) return null;
  const steps = joined(shown);
  const content = {
    data: [steps, ...shown.map((line) => spread(steps, line.steps, line.values))],
    errors: shown.map((line) => line.errors && spread(steps, line.steps, line.errors)),
    lines: shown,
    note,
  };
  const series = shown.map((line, index) => ({
    label: line.label,
    stroke: line.color ?? SERIES[index % SERIES.length],
    width: 1.75,
    dash: line.dash,
    spanGaps: true,
    points: { show: () => content.lines[index].steps.length <= WHISKERS, size: 5, fill: line.color ?? SERIES[index % SERIES.length] },
    value: (plot, value, own, at) => {
      const place = at ?? lastKnown(plot.data[own]);
      return told(plot.data[own][place], content.errors[own - 1]?.[place], unit);
    },
  }));
  const scales = { x: { time: false, range: (plot, low, high) => (content.data[0].length === 1 ? [content.data[0][0] - 1, content.data[0][0] + 1] : [low, high]) }, y: { range: (plot) => reach(plot, content) } };
  return new Chart(title, content, series, { axis, scales, hooks: { drawAxes: [(plot) => drawErrors(plot, content)] } }).section;
}

// layers: [{label, values, color}], one value for each step
export function stackChart(title, steps, layers, { note = "", unit = "" } = {}) {
  if (!steps.length || !layers.length) return null;
  const sums = [];
  layers.forEach((layer, index) => sums.push(layer.values.map((value, at) => (value ?? 0) + (index ? sums[index - 1][at] : 0))));
  const order = layers.map((_, index) => layers.length - 1 - index); // the highest sum first, the next is drawn over it
  const content = { data: [steps, ...order.map((index) => sums[index])], layers, note };
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
  return new Chart(title, content, series, { scales, padding: 0.5 }).section;
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
  constructor(title, content, series, { axis = "step", scales, hooks = {}, padding = 0 }) {
    Object.assign(this, { content, padding, plot: null, zoom: null });
    this.lines = JSON.stringify(series.map(({ label, stroke }) => [label, stroke]));
    const look = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: css("--chart-font") };
    this.options = {
      width: 400,
      height: HEIGHT,
      scales,
      hooks,
      series: [{ label: axis, value: (plot, value) => number(value ?? plot.data[0].at(-1)) }, ...series],
      axes: [
        { ...look, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
        { ...look, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      cursor: { sync: { key: `${axis}s` }, points: { size: 6 } },
      legend: { live: true },
    };
    this.box = h("div", { class: "chart" });
    this.note = h("p", { class: "note", hidden: !content.note }, content.note);
    this.section = h("section", { class: "card", data: { chart: title } }, h("h2", {}, title), this.note, this.box);
    charts.set(this.section, this);
    // a plot needs its width, which is known once its box is in the document
    const observer = new ResizeObserver(([{ contentRect: { width } }]) => width && this.draw(width));
    observer.observe(this.box);
    whenDiscarded(this.section, () => {
      observer.disconnect();
      this.plot?.destroy();
    });
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
    if (zoom) this.plot?.setScale("x", zoom);
  }

  // What the reader chose in a chart that had other lines.
  inherit(old) {
    this.zoom = old.chosen;
    const hidden = new Set((old.plot?.series ?? []).filter(({ show }) => !show).map(({ label }) => label));
    this.options.series.forEach((series) => Object.assign(series, hidden.has(series.label) ? { show: false } : {}));
  }
}

// The range of the values that are in sight, with their errors.
function reach(plot, { data, errors }) {
  const [from, to] = plot.series[0].idxs ?? [0, data[0].length - 1];
  let [low, high] = [Infinity, -Infinity];
  for (let line = 1; line < data.length; line += 1) {
    if (!plot.series[line].show) continue;
    for (let at = from; at <= to; at += 1) {
      const value = data[line][at];
      if (value === null) continue;
      const error = errors[line - 1]?.[at] ?? 0;
      low = Math.min(low, value - error);
      high = Math.max(high, value + error);
    }
  }
  if (low === high) return low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1];
  return low > high ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

function drawErrors(plot, { data, errors, lines }) {
  const context = plot.ctx;
  lines.forEach((line, index) => {
    if (!errors[index] || !plot.series[index + 1].show) return;
    const parts = [[]]; // a step without an error ends a part
    data[0].forEach((step, at) => {
      const [value, error] = [data[index + 1][at], errors[index][at]];
      if (value === null) return;
      if (error === null) parts.push([]);
      else parts.at(-1).push({ x: plot.valToPos(step, "x", true), low: plot.valToPos(value - error, "y", true), high: plot.valToPos(value + error, "y", true) });
    });
    context.save();
    context.beginPath();
    context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    context.clip();
    for (const points of parts) (line.bars ? drawBars : drawBand)(context, points, line.color ?? SERIES[index % SERIES.length]);
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
