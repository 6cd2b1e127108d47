// Charts over steps, drawn by uPlot: lines with error bars or bands, and stacks.

import { css, SERIES } from "viewer/colors";
import { card, h, number } from "viewer/dom";

const HEIGHT = 190;
const MANY = 80; // steps beyond which a stack has no gaps between its bars
const WHISKERS = 40; // points up to which errors are drawn as bars

// lines: [{label, steps, values, errors, color, dash}]
export function lineChart(title, lines, { note = "", unit = "", axis = "step" } = {}) {
  const shown = lines.filter((line) => line.values.some((value) => value !== null));
  if (!shown.length) return null;
  const steps = joined(shown);
  const data = [steps, ...shown.map((line) => spread(steps, line.steps, line.values))];
  const errors = shown.map((line) => line.errors && spread(steps, line.steps, line.errors));
  const series = shown.map((line, index) => ({
    label: line.label,
    stroke: line.color ?? SERIES[index % SERIES.length],
    width: 1.75,
    dash: line.dash,
    spanGaps: true,
    points: { show: line.steps.length <= WHISKERS, size: 5, fill: line.color ?? SERIES[index % SERIES.length] },
    value: (plot, value, own, at) => {
      const index = at ?? lastKnown(plot.data[own]);
      return told(plot.data[own][index], errors[own - 1]?.[index], unit);
    },
  }));
  const scales = { x: { time: false, range: (plot, low, high) => (steps.length === 1 ? [steps[0] - 1, steps[0] + 1] : [low, high]) }, y: { range: (plot) => reach(plot, data, errors) } };
  return chartCard(title, data, series, { note, axis, scales, hooks: { drawAxes: [(plot) => drawErrors(plot, data, errors, shown)] } });
}

// layers: [{label, values, color}], one value for each step
export function stackChart(title, steps, layers, { note = "", unit = "" } = {}) {
  if (!steps.length || !layers.length) return null;
  const sums = [];
  layers.forEach((layer, index) => sums.push(layer.values.map((value, at) => (value ?? 0) + (index ? sums[index - 1][at] : 0))));
  const order = layers.map((_, index) => layers.length - 1 - index); // the highest sum first, the next is drawn over it
  const series = order.map((index) => ({
    label: layers[index].label,
    stroke: layers[index].color,
    fill: layers[index].color,
    width: 0,
    paths: steps.length > MANY ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.bars({ size: [0.86, 60] }),
    points: { show: false },
    value: (plot, value, own, at) => told(layers[index].values[at ?? steps.length - 1], null, unit),
  }));
  const options = { note, scales: { x: { time: false, range: (_, low, high) => (steps.length === 1 ? [steps[0] - 0.5, steps[0] + 0.5] : [low - 0.5, high + 0.5]) }, y: { range: (_, low, high) => [0, high || 1] } } };
  return chartCard(title, [steps, ...order.map((index) => sums[index])], series, options);
}

function chartCard(title, data, series, { note, axis = "step", scales, hooks = {} }) {
  const box = h("div", { class: "chart" });
  const look = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: css("--chart-font") };
  const options = {
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
  let plot = null;
  // it needs its width, which is known once it is in the document
  new ResizeObserver(([{ contentRect }]) => {
    if (!contentRect.width) return;
    if (plot) plot.setSize({ width: contentRect.width, height: HEIGHT });
    else plot = new uPlot({ ...options, width: contentRect.width }, data, box);
  }).observe(box);
  return h("section", { class: "card", data: { chart: title } }, h("h2", {}, title), note && h("p", { class: "note" }, note), box);
}

// The range of the values that are in sight, with their errors.
function reach(plot, data, errors) {
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

function drawErrors(plot, data, errors, lines) {
  const context = plot.ctx;
  lines.forEach((line, index) => {
    if (!errors[index] || !plot.series[index + 1].show) return;
    const points = data[0]
      .map((step, at) => [step, data[index + 1][at], errors[index][at]])
      .filter(([, value, error]) => value !== null && error !== null)
      .map(([step, value, error]) => ({
        x: plot.valToPos(step, "x", true),
        low: plot.valToPos(value - error, "y", true),
        high: plot.valToPos(value + error, "y", true),
      }));
    context.save();
    context.beginPath();
    context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
    context.clip();
    (line.bars ? drawBars : drawBand)(context, points, line.color ?? SERIES[index % SERIES.length]);
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
