// Timeline: who was busy and who waited, from the trace of the run.

import { ask, isExport } from "viewer/api";
import { colorOfWork, css } from "viewer/colors";
import { card, empty, fill, h, number, scroller, seconds, select, whenDiscarded } from "viewer/dom";

const MAX_NAME = 320; // width of a name
const ROW = 18;
const FLIGHT = 34;
const GAP = 8;
const PAUSE_MS = 80; // of the reader, after which the server is asked for a part
const MAX_OTHERS = 4; // lanes that are named beside a wait
const WAITS = /wait|held|idle/;
const MAX_LISTED = 200; // spans of the table
// What the workers of a process are for, by the name of the process without its number.
const ROLES = {
  driver: "the program, which gives the others their work",
  actor: "the policy that is trained",
  critic: "predicts returns",
  reference: "the policy to stay near",
  rollout: "generates the rollouts",
  evaluation: "answers the evaluations",
  teacher: "a frozen teacher",
  train: "a model that is trained",
  inference: "generates texts",
};
const MEANINGS = {
  group: "all samples of a prompt, from their submission until the trainer takes them",
  "group: waiting": "not started: too many groups are in flight",
  "group: running": "the samples are generated and rewarded",
  "group: ready": "finished; the trainer has not taken the group yet",
  generate: "one sample waits for its tokens from the engine",
  advance: "the engine computes the next tokens of all requests",
  step: "one step of the trainer",
  "describe weights": "names, shapes and types of the weights, before they are sent",
  "weight sync": "the new weights go to the engine",
  train_batch: "forward, backward and optimizer",
};

export async function render(parameters, app) {
  const run = Number(parameters.run ?? 0);
  const about = app.runs[run];
  if (!about) return { body: empty("No such run") };
  const choose = app.runs.length > 1 && h("div", { class: "toolbar" }, select("run", app.runs.map((each, index) => [index, each.name]), run, (value) => app.go("timeline", { run: value }, { replace: true })));
  const data = await ask("timeline", { run });
  if (!data || !data.last) {
    const renew = () => app.runs[run].has_trace && app.again();
    return { renew, hearTrace: renew, body: h("div", { class: "page" }, choose, empty("This run has no trace", "Start it with trainer.trace=true, or trainer.trace_steps=[10,12] for some steps. The overview shows the seconds of each phase without a trace.")) };
  }
  const view = new Timeline(run, data);
  const keys = {
    ArrowLeft: () => view.pan(-0.25), ArrowRight: () => view.pan(0.25),
    "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: () => view.show(view.data.first, view.data.last),
  };
  return { body: h("div", { class: "page" }, h("h1", { class: "hidden" }, "Timeline"), choose, view.body), keys, shown: () => view.observe(), hearTrace: () => view.load() };
}

class Timeline {
  constructor(run, data) {
    this.run = run;
    this.names = 0; // width of the column of names
    this.canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", "aria-label": "timeline of the run; + and − zoom, the arrows move, and “Rows and spans” below has the numbers" });
    this.told = h("p", { class: "told", role: "status" }, "Point at a span, or tap it. Drag moves, the wheel with Ctrl zooms, + − 0 and the arrows do the same.");
    this.times = scroller("where the time went");
    this.rowsTable = h("details", { class: "values", on: { toggle: () => this.tabulate() } }, h("summary", {}, "Rows and spans"), scroller("rows and spans of the timeline"));
    this.cut = h("p", { class: "note", role: "status" });
    const part = isExport() ? "whole trace" : "window"; // a file has no server that counts in a window
    const button = (text, title, act) => h("button", { type: "button", title, "aria-label": title, on: { click: act } }, text);
    this.body = h("div", { class: "stack" },
      card("Who was busy, who waited", h("div", { class: "toolbar small" }, button("+", "zoom in (+)", () => this.zoom(0.5)), button("−", "zoom out (−)", () => this.zoom(2)), button("all", "whole trace (0)", () => this.show(this.data.first, this.data.last)),
        h("p", { class: "legend" }, h("i", { class: "swatch hatched" }), "waiting", h("small", {}, `%: share of the ${part} in which a row is busy; waiting does not count. max: the most at one time${isExport() ? " in the whole trace" : ""}. The table below has the colours.`))), this.cut, this.canvas, this.told, this.rowsTable),
      card(`Where the time of the ${part} went`, h("p", { class: "note" }, "Spans nest. The own time of a span leaves out the spans inside of it."), this.times));
    this.listen();
    this.take(data);
    this.drawTimes();
  }

  // Takes an answer, whose window the reader may leave before the next one. Others may show the same answer.
  take(data) {
    this.data = { ...data };
    this.answered = [data.start, data.end];
    const long = data.num_left_out > 0 && `The trace is long: its newest part is shown, from ${seconds(data.first)} on. Perfetto (ui.perfetto.dev) opens all of trace.json. `;
    const earlier = data.earlier.length > 0 && `The run was resumed: this is its last session. Perfetto opens the earlier ones, the newest first: ${data.earlier.join(", ")}.`;
    fill(this.cut, long, earlier);
  }

  observe() {
    const observer = new ResizeObserver(() => this.draw());
    observer.observe(this.canvas.parentElement);
    whenDiscarded(this.body, () => {
      observer.disconnect();
      this.end();
    });
  }

  // Draws a part from what is there, and from the server's answer when the reader pauses.
  show(start, end) {
    const { first, last } = this.data;
    const length = Math.min(last - first, Math.max(0.001, end - start));
    const from = Math.max(first, Math.min(start, last - length));
    this.window = length < last - first ? [from, from + length] : null; // all of a trace that grows
    this.data = { ...this.data, start: from, end: from + length };
    this.draw();
    clearTimeout(this.pause);
    this.asked?.abort();
    if (!isExport()) this.pause = setTimeout(() => this.load(), PAUSE_MS);
  }

  async load() {
    this.asked?.abort();
    this.asked = new AbortController();
    const [start, end] = this.window ?? [];
    const answer = await ask("timeline", { run: this.run, ...(this.window && { start, end }) }, this.asked.signal).catch(() => null);
    if (!answer) return; // the reader moved on, or the server is gone
    this.take(answer);
    this.draw();
    this.drawTimes();
  }

  end() {
    clearTimeout(this.pause);
    this.asked?.abort();
  }

  pan(share) {
    const [start, end] = this.window ?? [this.data.start, this.data.end];
    this.show(start + share * (end - start), end + share * (end - start));
  }

  zoom(factor, at = 0.5) {
    const [start, end] = this.window ?? [this.data.start, this.data.end];
    const center = start + at * (end - start);
    this.show(center - at * factor * (end - start), center + (1 - at) * factor * (end - start));
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth - 32;
    if (width < 1) return;
    this.boxes = [];
    this.rows = this.layout();
    const height = this.rows.at(-1).bottom + 26;
    const ratio = devicePixelRatio || 1;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    this.names = 74 + Math.min(MAX_NAME, width / 3, Math.max(...this.rows.map((row) => context.measureText(titleOf(row)).width)));
    const x = (time) => this.names + ((width - this.names) * (time - this.data.start)) / (this.data.end - this.data.start);
    this.drawAxis(context, x, height, Math.max(2, Math.min(8, (width - this.names) / 70)));
    for (const row of this.rows) (row.lane ? this.drawLane : this.drawFlight).call(this, context, row, x, width);
    this.tabulate();
  }

  // What the picture shows, for those who do not see it: its rows, and the longest spans in sight.
  tabulate() {
    if (!this.rowsTable.open) return;
    const { start, end, lanes, flights } = this.data;
    const table = (heads, rows) => h("table", { class: "narrow" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows));
    const line = (name, cells) => h("tr", {}, h("th", { scope: "row" }, name), cells.map((cell) => h("td", {}, cell)));
    const rows = lanes.map((lane) => line(titleOf({ lane }), [roleOf(lane), `${Math.round(100 * lane.busy)} % busy`]));
    const flown = flights.map((flight) => line(flight.name, [MEANINGS[flight.name] ?? "", `at most ${number(flight.most)} at a time`]));
    const spans = lanes.flatMap((lane) => lane.spans.filter(([from, to]) => to >= start && from <= end).map((span) => ({ lane, span }))).sort((a, b) => (b.span[1] - b.span[0]) - (a.span[1] - a.span[0]));
    const longest = spans.slice(0, MAX_LISTED).map(({ lane, span: [from, to, name] }) => line(name, [titleOf({ lane }), seconds(to - from), `${number(from, 6)} s`]));
    fill(this.rowsTable.lastElementChild, table(["row", "role", "use"], [...rows, ...flown]), h("p", { class: "note" }, `The ${number(longest.length)} longest of ${number(spans.length)} spans in sight.`), table(["span", "row", "length", "from"], longest));
  }

  layout() {
    let top = 4;
    const rows = this.data.lanes.map((lane) => {
      const depth = Math.min(4, 1 + lane.spans.reduce((most, span) => Math.max(most, span[3]), 0));
      const row = { lane, top, bottom: top + depth * ROW };
      top = row.bottom + GAP;
      return row;
    });
    for (const flight of this.data.flights) {
      rows.push({ flight, top, bottom: top + FLIGHT });
      top += FLIGHT + GAP;
    }
    return rows;
  }

  drawAxis(context, x, height, most) {
    const length = this.data.end - this.data.start;
    const rough = length / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    context.fillStyle = css("--muted");
    context.strokeStyle = css("--grid");
    context.textAlign = "center";
    for (let time = Math.ceil(this.data.start / tick) * tick; time <= this.data.end; time += tick) {
      context.beginPath();
      context.moveTo(x(time), 0);
      context.lineTo(x(time), height - 20);
      context.stroke();
      context.fillText(`${number(time, 6)} s`, Math.min(x(time), x(this.data.end) - 22), height - 9);
    }
  }

  drawName(context, row, title, share) {
    context.textAlign = "left";
    context.fillStyle = css("--text");
    const middle = row.lane ? row.top + ROW / 2 : (row.top + row.bottom) / 2;
    context.fillText(clipped(context, title, this.names - 66), 0, middle);
    context.fillStyle = css("--muted");
    context.textAlign = "right";
    context.fillText(share, this.names - 8, middle);
  }

  drawLane(context, row, x, width) {
    const { lane, top } = row;
    this.drawName(context, row, titleOf(row), `${Math.round(100 * lane.busy)} %`);
    for (const [start, end, name, depth] of lane.spans) {
      if (depth > 3 || end < this.data.start || start > this.data.end) continue;
      const left = Math.max(this.names, x(start));
      const size = Math.max(0.7, Math.min(width, x(end)) - left);
      const box = { left, top: top + depth * ROW, width: size, height: ROW - 2 };
      context.fillStyle = WAITS.test(name) ? css("--wait") : colorOfWork(name);
      context.fillRect(box.left, box.top, box.width, box.height);
      if (WAITS.test(name)) hatch(context, box);
      if (size > 34) {
        context.fillStyle = WAITS.test(name) ? css("--text") : "#fff";
        context.textAlign = "left";
        context.fillText(clipped(context, name, size - 8), left + 4, box.top + box.height / 2);
      }
      this.boxes.push({ ...box, wait: WAITS.test(name) && { lane, start, end }, text: `${lane.process}${roleOf(lane) && ` (${roleOf(lane)})`}: ${name}, ${seconds(end - start)}, from ${number(start, 6)} s to ${number(end, 6)} s${MEANINGS[name] ? `; ${MEANINGS[name]}` : ""}` });
    }
  }

  drawFlight(context, row, x, width) {
    const { flight, top, bottom } = row;
    this.drawName(context, row, titleOf(row), `max ${number(flight.most)}`);
    const [start, end] = this.answered;
    const edge = (bin) => Math.max(this.names, Math.min(width, x(start + ((end - start) * bin) / flight.counts.length)));
    context.fillStyle = colorOfWork(flight.name);
    flight.counts.forEach((count, bin) => {
      const [left, size] = [edge(bin), edge(bin + 1) - edge(bin)];
      if (size <= 0) return; // out of sight
      const height = count && Math.max(1, ((bottom - top) * count) / flight.most);
      context.fillRect(left, bottom - height, Math.min(size + 0.5, width - left), height);
      this.boxes.push({ left, top, width: size, height: bottom - top, text: `${flight.name}: ${number(count, 3)} at a time, on average${MEANINGS[flight.name] ? `; ${MEANINGS[flight.name]}` : ""}` });
    });
  }

  listen() {
    let from = null;
    const share = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return (event.clientX - box.left - this.names) / (box.width - this.names);
    };
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.5 : 1 / 1.5, share(event));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      from = share(event);
      this.tell(event);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (from !== null && Math.abs(share(event) - from) > 0.01) this.pan(from - share(event));
      from = null;
    });
    this.canvas.addEventListener("pointermove", (event) => this.tell(event));
  }

  // What is under the pointer.
  tell({ clientX, clientY }) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [clientX - left, clientY - top];
    const hit = this.boxes?.findLast((box) => x >= box.left && x <= box.left + box.width && y >= box.top && y <= box.top + box.height);
    if (hit) this.told.textContent = hit.text + (hit.wait ? this.meanwhile(hit.wait) : "");
  }

  // Who was busy during a wait, the busiest first.
  meanwhile({ lane, start, end }) {
    const [from, to] = [Math.max(start, this.data.start), Math.min(end, this.data.end)];
    const others = this.data.lanes.filter((other) => other !== lane).map((other) => ({ name: titleOf({ lane: other }), ...busyIn(other, from, to) }))
      .filter(({ busy }) => busy > 0).sort((a, b) => b.busy - a.busy);
    const told = others.slice(0, MAX_OTHERS).map(({ name, busy, most }) => `${name} (${most}) ${Math.round((100 * busy) / (to - from))} %`);
    const rest = others.length > MAX_OTHERS ? `, and ${others.length - MAX_OTHERS} more` : "";
    return `. Busy meanwhile: ${told.length ? told.join(", ") + rest : "nobody"}.`;
  }

  drawTimes() {
    const rows = this.data.times.map(({ process, name, seconds: total, own, count, share }) => h("tr", {}, h("td", { title: roleOf({ process }) }, process.split(" (")[0]), h("td", { title: MEANINGS[name] }, h("span", { class: "key" }, h("i", { class: `swatch${WAITS.test(name) ? " hatched" : ""}`, style: { "background-color": colorOfWork(name) } }), name)), h("td", { class: "number" }, seconds(own)), h("td", { class: "number" }, `${(100 * share).toFixed(1)} %`), h("td", { class: "number" }, seconds(total)), h("td", { class: "number" }, number(count))));
    const head = ["who", "what", "own time", isExport() ? "of the whole trace" : "of the window", "with spans inside", "times"].map((title, index) => h("th", { scope: "col", class: index > 1 ? "number" : "" }, title));
    fill(this.times, h("table", { class: "times" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
  }
}

// Seconds in which a lane is busy between two times, and the span that took most of them. A wait is not busy, nor is
// what happens inside of it.
function busyIn({ spans }, from, to) {
  const seconds = new Map();
  let busy = 0;
  let outermost = Infinity; // depth of the wait around a span
  let top = "";
  for (const [start, end, name, depth] of spans) {
    if (depth > outermost) continue;
    outermost = WAITS.test(name) ? depth : Infinity;
    const inside = Math.max(0, Math.min(end, to) - Math.max(start, from));
    if (depth === 0) top = name;
    const own = outermost === depth ? (depth ? -inside : 0) : depth ? 0 : inside;
    busy += own;
    seconds.set(top, (seconds.get(top) ?? 0) + own);
  }
  const most = [...seconds].reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0])[0];
  return { busy, most };
}

function roleOf({ process }) {
  return ROLES[process.split(" (")[0].replace(/-\d+$/, "")] ?? "";
}

function titleOf({ lane, flight }) {
  return flight ? flight.name : lane.process.split(" (")[0] + (lane.name && lane.name !== "the program" ? `, ${lane.name}` : "");
}

function hatch(context, { left, top, width, height }) {
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.strokeStyle = css("--muted");
  context.globalAlpha = 0.5;
  context.beginPath();
  for (let at = left - height; at < left + width; at += 7) {
    context.moveTo(at, top + height);
    context.lineTo(at + height, top);
  }
  context.stroke();
  context.restore();
}

function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return `${text.slice(0, length)}…`;
}
