// Rollouts of one step: what was asked and answered, a map of groups, a histogram, a scatter, filters and a table.

import { ask, isExport } from "viewer/api";
import { css, range, scale, STATUS } from "viewer/colors";
import { card, empty, fill, groupedBy, h, key, mean, newest, number, rowsOf, scroller, select, svg, words } from "viewer/dom";
import { News, placeBar, placeOf, statusChip, TARGET } from "viewer/place";

const BINS = 20;
const SHOWN_ROWS = 100;
const SHOWN_TEXTS = innerWidth < 700 ? 24 : 64; // rollouts whose texts are listed at first
const MAX_DATA = 4; // columns of the data beside a prompt
const SHOWN_CELLS = 2000;
const MAX_IN_LINE = 16; // cells beside each other
const LEFT = 110; // of the scatter, for the numbers of its axis
const HIDDEN = ["step", "ended"];
const STATUS_COLOR = "status";
const FILTERS = ["status", "reason", "low", "high", "min", "max", "text"];
const isLost = ({ status }) => status !== "trained" && status !== "evaluated";
const isGiven = (value) => value !== undefined && value !== "";

export async function render(parameters, app, signal) {
  const { missing, run, about, source } = placeOf(parameters, app, "rollouts");
  if (missing) return missing;
  const steps = about.sources[source].steps;
  const step = steps.includes(Number(parameters.step)) ? Number(parameters.step) : newest(steps, about);
  const rows = rowsOf((await ask("rows", { run, source, step })).columns);
  const missed = isGiven(parameters.step) && step !== Number(parameters.step) && `Step ${parameters.step} has no rollouts. This is step ${step}.`;
  const state = { app, run, about, source, step, steps, rows, signal, missed, parameters: { ...parameters, run, source, step } };
  const body = h("div", { class: "page" });
  const texts = ask("texts", { run, source, step }).catch((error) => ({ groups: [], answers: [], error }));
  const view = new View(state, body);
  view.draw();
  texts.then((found) => signal.aborted || view.take(found));
  const move = (by) => () => {
    const next = steps[steps.indexOf(step) + by];
    return next === undefined ? false : void app.go("rollouts", { ...state.parameters, step: next }, { replace: true });
  };
  return { body, keys: { "[": move(-1), "]": move(1) }, renew: () => view.news.tell() };
}

class View {
  constructor(state, body) {
    Object.assign(this, state);
    this.body = body;
    this.numeric = Object.keys(this.rows[0] ?? {}).filter((name) => !HIDDEN.includes(name) && this.rows.some((row) => typeof row[name] === "number"));
    this.given = { color: this.source === "train" ? "reward" : "score", x: "response_tokens", y: "reward", sort: "group", ...this.parameters };
    if (!this.numeric.includes(this.given.color) && this.given.color !== STATUS_COLOR) this.given.color = "reward";
    this.hits = null;
    this.address = location.hash;
  }

  draw() {
    this.texts = null;
    this.list = h("div", { class: "stories", "aria-busy": "true" });
    this.grid = h("div", { class: "grid scroll", role: "region", tabindex: "0", "aria-label": "map of groups and samples" });
    this.side = h("div", { class: "contents" });
    this.table = scroller("all columns of the rollouts");
    this.found = h("div");
    const map = card("Map of groups", this.legend(), this.heads(), this.grid);
    const all = h("details", { class: "card" }, h("summary", {}, h("h2", {}, "All columns")), h("p", { class: "note" }, "A click on a heading sorts. The table scrolls sideways."), this.table);
    fill(this.body, h("h1", { class: "hidden" }, "Rollouts"), this.toolbar(), this.missed && h("p", { class: "note", role: "status" }, this.missed), this.found, h("div", { class: "columns groups" }, this.list, h("div", { class: "side" }, map, this.side)), all);
    this.drawChosen();
  }

  // Takes the texts of the step, which come after its rows.
  take({ groups, answers, error }) {
    this.texts = {
      groups: new Map(groups.map((each) => [each.group, each])),
      answers: new Map(answers.map(({ group, sample, end }) => [`${group}/${sample}`, end])),
      error,
    };
    this.list.removeAttribute("aria-busy");
    this.drawTexts(new Set(this.rows.filter((row) => this.matches(row))));
  }

  drawChosen() {
    const chosen = new Set(this.rows.filter((row) => this.matches(row)));
    this.count.textContent = chosen.size === this.rows.length ? `${number(this.rows.length)} rollouts` : `${number(chosen.size)} of ${number(this.rows.length)} rollouts`;
    this.clear.hidden = !FILTERS.some((name) => isGiven(this.given[name]));
    this.drawTexts(chosen);
    this.drawGrid(chosen);
    fill(this.side, this.histogram(chosen), this.scatter(chosen));
    this.drawTable([...chosen]);
  }

  // a change of a filter keeps the step's rows, and is in the address
  set(changes) {
    Object.assign(this.given, changes);
    Object.assign(this.parameters, changes);
    history.replaceState(null, "", this.app.link("rollouts", this.parameters));
    this.address = location.hash;
    this.news.tell(); // its links keep the filters
    this.drawChosen();
  }

  matches(row) {
    const { status, reason, low, high, min, max } = this.given;
    return (!status || row.status === status) && (!reason || row.reason === reason)
      && isWithin(row[this.value], low, high) && isWithin(row.reward, min, max)
      && (!this.hits || this.hits.has(`${row.group}/${row.sample}`));
  }

  get value() {
    return this.given.color === STATUS_COLOR ? "reward" : this.given.color;
  }

  toolbar() {
    const distinct = (name) => [...new Set(this.rows.map((row) => row[name]).filter(Boolean))].sort();
    const choices = (name) => [...new Set([...distinct(name), this.given[name]].filter(Boolean))].sort(); // also a filter that no rollout of this step passes
    const choose = (name, text) => select(name, [["", "any"], ...choices(name).map((value) => [value, text(value)])], this.given[name] ?? "", (value) => this.set({ [name]: value }));
    const limit = (name, text) => h("input", { type: "number", step: "any", class: "limit", placeholder: text, "aria-label": `${text} reward`, value: this.given[name], on: { input: (event) => this.set({ [name]: event.target.value }) } });
    this.clear = h("button", { type: "button", on: { click: () => this.app.go("rollouts", { ...this.parameters, ...Object.fromEntries(FILTERS.map((name) => [name, ""])) }, { replace: true }) } }, "clear filters");
    this.count = h("strong", { class: "count" });
    this.news = new News("rollouts", this);
    const search = h("input", { type: "search", placeholder: "Search the texts", "aria-label": "Search the texts", value: this.given.text, on: { change: (event) => this.search(event.target.value) } });
    if (this.given.text) this.search(this.given.text);
    return h("div", { class: "toolbar" },
      placeBar("rollouts", this),
      choose("status", words),
      choices("reason").length > 0 && choose("reason", (value) => value.slice(0, 60)),
      h("span", { class: "limits" }, "reward", limit("min", "min"), "–", limit("max", "max")),
      select("colour", [...this.numeric, STATUS_COLOR].map((name) => [name, words(name)]), this.given.color, (value) => this.app.go("rollouts", { ...this.parameters, color: value, low: "", high: "" }, { replace: true })),
      select("sort", [["group", "group"], ["mean", "mean, highest first"], ["least", "mean, lowest first"], ["spread", "spread"]], this.given.sort, (value) => this.set({ sort: value })),
      search,
      this.clear,
      this.news.box,
      this.count);
  }

  async search(text) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    if (!text) {
      this.hits = null;
      fill(this.found);
      this.set({ text });
      return;
    }
    const answer = await searched(this.run, this.source, this.step, text, this.rows).catch((error) => ({ hits: [], error }));
    if (turn !== this.turn || this.signal.aborted || location.hash !== this.address) return; // the reader looks for another text, or elsewhere
    const here = answer.hits.filter((hit) => hit.step === this.step);
    this.hits = new Set(here.map((hit) => `${hit.group}/${hit.sample}`));
    const lines = answer.hits.slice(0, 20).map((hit) => h("li", {},
      h("a", { href: this.sampleLink(hit) }, `group ${hit.group}, sample ${hit.sample}`), " ", hit.snippet[0], h("mark", {}, hit.snippet[1]), hit.snippet[2]));
    const title = answer.error ? answer.error.message : answer.hits.length ? `${answer.is_cut ? "At least " : ""}${answer.hits.length} recorded texts of this step have “${text}”` : `No recorded text of this step has “${text}”`;
    fill(this.found, card(title, lines.length > 0 && h("ul", { class: "hits" }, lines)));
    this.set({ text });
  }

  sampleLink({ group, sample }) {
    return this.app.link("sample", { run: this.run, source: this.source, step: this.step, group, sample });
  }

  color(row) {
    return this.given.color === STATUS_COLOR ? STATUS[row.status] ?? "#888" : scale(row[this.given.color], ...this.limits);
  }

  legend() {
    this.limits = range(this.rows.map((row) => row[this.value]));
    if (this.given.color === STATUS_COLOR) {
      const seen = new Set(this.rows.map((row) => row.status));
      return h("p", { class: "legend" }, [...seen].map((status) => key(STATUS[status] ?? "#888", words(status))));
    }
    const [low, high] = this.limits;
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => scale(low + share * (high - low), low, high));
    return h("p", { class: "legend" }, `${words(this.given.color)} `, number(low, 3), h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } }), number(high, 3), h("span", { class: "key" }, h("i", { class: "swatch none" }), "none"), h("span", { class: "key" }, h("i", { class: "swatch lost" }), this.source === "train" ? "not trained on" : "not counted"));
  }

  // Headings of the grid's columns.
  heads() {
    return h("div", { class: "line heads" }, h("span", {}, "group"), h("span", { class: "mean" }, "mean"), h("span", {}, "samples"));
  }

  meanOf(rows) {
    return mean(rows.map((row) => row[this.value]));
  }

  // The groups with a chosen rollout, in the chosen order.
  get sorted() {
    const { value } = this;
    const spread = (rows) => { const [low, high] = range(rows.map((row) => row[value])); return high - low; };
    const orders = { group: ([a], [b]) => a - b, mean: ([, a], [, b]) => this.meanOf(b) - this.meanOf(a), least: ([, a], [, b]) => this.meanOf(a) - this.meanOf(b), spread: ([, a], [, b]) => spread(b) - spread(a) };
    return [...groupedBy(this.rows, (row) => row.group)].sort(orders[this.given.sort] ?? orders.group);
  }

  // Each prompt with its answers and their rewards, as texts.
  drawTexts(chosen, limit = SHOWN_TEXTS) {
    const shown = this.sorted.map(([group, rows]) => [group, rows, rows.filter((row) => chosen.has(row))]).filter(([, , own]) => own.length);
    const made = [];
    let number = 0;
    for (const each of shown) {
      if (number >= limit) break;
      number += each[2].length;
      made.push(this.story(...each));
    }
    const more = made.length < shown.length && h("button", { type: "button", class: "more", on: { click: () => this.drawTexts(chosen, 4 * limit) } }, `Show more of ${shown.length} groups (${made.length} are shown)`);
    const missing = this.texts && !this.texts.answers.size && h("p", { class: "note" }, this.texts.error?.message ?? "No text of this step is recorded: trainer.record=sample records those of some groups, all those of every group.");
    const judged = made.length > 0 && this.rows.some(({ answer }) => answer) && h("p", { class: "note" }, "Each line has the reward of an answer, on grey what the reward has judged, and the end of the text.");
    fill(this.list, missing, judged, made.length ? made : empty("Nothing matches", "No rollout of this step passes the filters."), more);
  }

  story(group, rows, chosen) {
    const { prompt, data = [] } = this.texts?.groups.get(group) ?? {};
    const others = data.filter(([name]) => name !== "prompt" && name !== "messages").sort(([a], [b]) => TARGET.test(b) - TARGET.test(a)); // the target first
    const shown = others.slice(0, MAX_DATA).map(([name, value]) => h("span", {}, h("small", {}, name), " ", h("span", { dir: "auto" }, value)));
    const rewards = rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
    const reasons = [...new Set(chosen.filter((row) => isLost(row) && row.status !== "filtered").map(({ reason }) => reason).filter(Boolean))];
    const isBlank = this.texts?.answers.size && !chosen.some((row) => this.texts.answers.has(`${group}/${row.sample}`));
    const answers = chosen.map((row) => h("li", {},
      h("a", { href: this.sampleLink(row), "aria-label": `group ${group} sample ${row.sample}, reward ${number(row.reward)}` },
        h("i", { class: `swatch${isLost(row) ? " lost" : ""}`, style: { "background-color": this.color(row) } }), h("b", { class: "reward" }, number(row.reward, 3))),
      h("span", { class: "answer", dir: "auto" }, row.answer !== null && row.answer !== undefined && h("strong", { title: "the answer that the reward has judged" }, String(row.answer).slice(0, 200)), " ", this.texts?.answers.get(`${group}/${row.sample}`) ?? ""),
      h("small", { class: "facts" }, isLost(row) && [statusChip(row.status), " "], row.response_tokens !== null && `${number(row.response_tokens)} tokens`)));
    return h("section", { class: "card story" },
      h("h2", { dir: "auto" }, prompt ?? `item ${rows[0].item}`),
      h("p", { class: "about" }, shown, h("span", {}, h("small", {}, "group"), ` ${group}`), prompt && h("span", {}, h("small", {}, "item"), ` ${rows[0].item}`),
        h("span", {}, h("small", {}, `mean ${words(this.value)}`), ` ${number(this.meanOf(rows), 3)}`), this.mark(rewards),
        isBlank && h("span", { class: "mark", title: "trainer.record=sample records the texts of some groups, all those of every group" }, "texts not recorded"), reasons.map((reason) => h("span", { class: "why" }, reason))),
      h("ul", {}, answers));
  }

  // A mark on a group whose rewards are all equal.
  mark(rewards) {
    if (this.source !== "train" || rewards.length < 2 || new Set(rewards).size > 1) return null;
    const teaches = this.about.equal_rewards_teach;
    return h("span", { class: `mark${teaches ? "" : " warning"}`, title: teaches ? "All rewards are equal. The run does not say that it learns nothing from such groups." : "All rewards are equal, so that no answer is better than another: this run learns nothing from the group." }, teaches ? "equal rewards" : "no signal: equal rewards");
  }

  drawGrid(chosen) {
    const shown = this.sorted.filter(([, rows]) => rows.some((row) => chosen.has(row)));
    const groups = { size: new Set(this.rows.map((row) => row.group)).size };
    if (!shown.length) {
      fill(this.grid, empty("Nothing matches", "No rollout of this step passes the filters."));
      return;
    }
    const lines = (from, to) => shown.slice(from, to).map(([group, rows]) => this.line(group, rows, chosen));
    const many = Math.ceil((SHOWN_CELLS * groups.size) / this.rows.length);
    const more = shown.length > many && h("button", { type: "button", class: "more", on: { click: (event) => event.target.replaceWith(...lines(many)) } }, `Show all ${number(shown.length)} groups`);
    this.grid.style.setProperty("--samples", Math.min(MAX_IN_LINE, Math.max(...shown.map(([, rows]) => rows.length))));
    fill(this.grid, lines(0, many), more);
    const first = this.grid.querySelector("a.cell");
    if (first) first.tabIndex = 0;
    this.grid.onkeydown = (event) => this.moveFocus(event);
  }

  line(group, rows, chosen) {
    const cells = rows.map((row) => h("a", {
      class: `cell${isLost(row) ? " lost" : ""}${chosen.has(row) ? "" : " dim"}`,
      tabindex: "-1", href: this.sampleLink(row),
      title: `sample ${row.sample}: ${words(this.value)} ${number(row[this.value])}\n${words(row.status)}${row.reason ? `: ${row.reason}` : ""}\n${number(row.response_tokens)} tokens`,
      "aria-label": `group ${group} sample ${row.sample}, ${words(this.value)} ${number(row[this.value])}, ${words(row.status)}`,
      style: { "background-color": this.color(row) },
    }));
    return h("div", { class: "line" }, h("b", { title: `item ${rows[0].item}` }, group), h("span", { class: "mean", title: `mean of ${words(this.value)}` }, number(this.meanOf(rows), 3)), h("span", { class: "cells" }, cells));
  }

  moveFocus(event) {
    const cell = event.target.closest("a.cell");
    const line = cell?.closest(".line");
    if (!line) return;
    const row = [...line.querySelectorAll("a.cell")];
    const beside = { ArrowLeft: row[row.indexOf(cell) - 1], ArrowRight: row[row.indexOf(cell) + 1] };
    const other = { ArrowUp: line.previousElementSibling, ArrowDown: line.nextElementSibling }[event.key];
    const next = beside[event.key] ?? [...(other?.querySelectorAll("a.cell") ?? [])].slice(0, row.indexOf(cell) + 1).at(-1);
    if (!next) return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  histogram(chosen) {
    const values = this.rows.map((row) => row[this.value]).filter((value) => typeof value === "number");
    if (!values.length) return card(`Histogram of ${words(this.value)}`, empty("No values", "No rollout of this step has one."));
    const [low, high] = range(values);
    const bins = low === high ? 1 : BINS;
    const width = (high - low) / bins || 1;
    const place = (value) => Math.min(bins - 1, Math.floor((value - low) / width));
    const all = Array(bins).fill(0);
    const own = Array(bins).fill(0);
    for (const row of this.rows) {
      const value = row[this.value];
      if (typeof value !== "number") continue;
      all[place(value)] += 1;
      if (chosen.has(row)) own[place(value)] += 1;
    }
    const most = Math.max(...all);
    const bars = all.map((count, bin) => this.bar(bin, count, own[bin], most, low + bin * width, low + (bin + 1) * width, bins));
    const isFiltered = isGiven(this.given.low);
    return card(`Histogram of ${words(this.value)}`,
      h("p", { class: "note" }, isFiltered ? h("button", { type: "button", class: "more", on: { click: () => this.set({ low: "", high: "" }) } }, `Show all values, not only ${number(Number(this.given.low), 3)} to ${number(Number(this.given.high), 3)}`) : "Click a bar to see only its rollouts."),
      svg("svg", { viewBox: "0 0 400 120", class: "histogram", role: "group", "aria-label": `histogram of ${words(this.value)}` }, bars,
        svg("text", { x: 0, y: 118 }, number(low, 3)), svg("text", { x: 400, y: 118, "text-anchor": "end" }, number(high, 3)), svg("text", { x: 200, y: 118, "text-anchor": "middle" }, `at most ${most} in a bar`)));
  }

  bar(bin, count, own, most, low, high, bins) {
    const size = 400 / bins;
    const height = (number) => (100 * number) / most;
    const act = () => this.set({ low: String(low), high: String(bin === bins - 1 ? high + 1e-9 : high - 1e-12) });
    const told = `${number(low, 3)} to ${number(high, 3)}: ${own} of ${count}`;
    return svg("g", { role: "button", tabindex: count ? "0" : null, "aria-label": told, class: "bar", on: { click: act, keydown: (event) => event.key === "Enter" && act() } },
      svg("title", {}, told), svg("rect", { x: bin * size, y: 0, width: size, height: 100, class: "hit" }),
      svg("rect", { x: bin * size + 1, y: 100 - height(count), width: size - 2, height: height(count), class: "all" }),
      svg("rect", { x: bin * size + 1, y: 100 - height(own), width: size - 2, height: height(own), class: "own" }));
  }

  scatter(chosen) {
    const { x, y } = this.given;
    const points = [...chosen].filter((row) => typeof row[x] === "number" && typeof row[y] === "number");
    const choices = this.numeric.map((name) => [name, words(name)]);
    const head = h("div", { class: "toolbar small" }, select("x", choices, x, (value) => this.set({ x: value })), select("y", choices, y, (value) => this.set({ y: value })));
    if (!points.length) return card("Scatter", head, empty("No points", "No chosen rollout has both values."));
    const canvas = h("canvas", { class: "scatter", width: 800, height: 440, role: "img", "aria-label": `${words(y)} over ${words(x)}; “All columns” has the numbers` });
    const note = h("p", { class: "note" }, "Click a point to open its rollout.");
    const [xs, ys] = [range(points.map((row) => row[x])), range(points.map((row) => row[y]))];
    const at = (row) => [LEFT + (780 - LEFT) * share(row[x], xs), 395 - 375 * share(row[y], ys)];
    drawScatter(canvas, points, at, (row) => this.color(row), [xs, ys]);
    const nearest = (event) => {
      const box = canvas.getBoundingClientRect();
      const [left, top] = [((event.clientX - box.left) * 800) / box.width, ((event.clientY - box.top) * 440) / box.height];
      const distance = (row) => { const [px, py] = at(row); return (px - left) ** 2 + (py - top) ** 2; };
      const best = points.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      return distance(best) < 400 ? best : null;
    };
    canvas.addEventListener("mousemove", (event) => {
      const row = nearest(event);
      canvas.classList.toggle("over", Boolean(row));
      note.textContent = row ? `group ${row.group}, sample ${row.sample}: ${words(x)} ${number(row[x])}, ${words(y)} ${number(row[y])}` : "Click a point to open its rollout.";
    });
    canvas.addEventListener("click", (event) => { const row = nearest(event); if (row) location.hash = this.sampleLink(row); });
    return card("Scatter", head, canvas, note);
  }

  drawTable(rows, order = this.order ?? ["group", 1], shown = SHOWN_ROWS) {
    this.order = order;
    const names = Object.keys(this.rows[0] ?? {}).filter((name) => !HIDDEN.includes(name) && this.rows.some((row) => row[name] !== null && row[name] !== ""));
    const [column, way] = order;
    const sorted = rows.toSorted((a, b) => way * compared(a[column], b[column]));
    const heads = names.map((name) => h("th", { scope: "col", "aria-sort": name === column ? (way > 0 ? "ascending" : "descending") : null },
      h("button", { type: "button", on: { click: () => this.drawTable(rows, [name, name === column ? -way : 1]) } }, words(name))));
    const lines = sorted.slice(0, shown).map((row) => h("tr", {}, names.map((name) => h("td", { class: typeof row[name] === "number" ? "number" : "", title: typeof row[name] === "string" ? row[name] : null },
      name === "group" ? h("a", { href: this.sampleLink(row) }, row.group) : name === "status" ? statusChip(row.status) : typeof row[name] === "boolean" ? (row[name] ? "yes" : "no") : number(row[name])))));
    const more = sorted.length > shown && h("button", { type: "button", class: "more", on: { click: () => this.drawTable(rows, order, shown + 4 * SHOWN_ROWS) } }, `Show more of ${number(sorted.length)} rows`);
    fill(this.table, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, lines)), more);
  }
}

// An exported file has no server that searches; it looks through the texts that it carries.
async function searched(run, source, step, text, rows) {
  if (!isExport()) return ask("search", { run, source, step, text });
  const hits = [];
  for (const { group, sample } of rows) {
    const found = await ask("sample", { run, source, step, group, sample }).catch(() => null);
    const segment = found?.row.segments?.find((each) => each.text.toLowerCase().includes(text.toLowerCase()));
    if (!segment) continue;
    const at = segment.text.toLowerCase().indexOf(text.toLowerCase());
    hits.push({ step, group, sample, snippet: [segment.text.slice(Math.max(0, at - 60), at), segment.text.slice(at, at + text.length), segment.text.slice(at + text.length, at + text.length + 60)] });
  }
  return { hits, is_cut: false };
}

function drawScatter(canvas, points, at, color, [xs, ys]) {
  const context = canvas.getContext("2d");
  context.font = "22px system-ui, sans-serif";
  context.fillStyle = css("--muted");
  context.strokeStyle = css("--grid");
  context.lineWidth = 2;
  for (const part of [0, 0.5, 1]) {
    const isTold = ([low, high]) => low !== high || part === 0.5; // equal values lie in the middle
    const [left, top] = [LEFT + (780 - LEFT) * part, 395 - 375 * part];
    context.strokeRect(left, 20, 0, 375);
    context.strokeRect(LEFT, top, 780 - LEFT, 0);
    context.textAlign = part === 1 ? "right" : part ? "center" : "left";
    if (isTold(xs)) context.fillText(number(xs[0] + part * (xs[1] - xs[0]), 3), left, 430);
    context.textAlign = "right";
    if (isTold(ys)) context.fillText(number(ys[0] + part * (ys[1] - ys[0]), 3), LEFT - 10, top + 8);
  }
  context.globalAlpha = 0.75;
  for (const row of points) {
    const [left, top] = at(row);
    context.fillStyle = color(row);
    context.strokeStyle = css("--muted");
    context.lineWidth = 1;
    context.beginPath();
    context.arc(left, top, 8, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  }
}

function share(value, [low, high]) {
  return high > low ? (value - low) / (high - low) : 0.5;
}

function isWithin(value, low, high) {
  if (!isGiven(low) && !isGiven(high)) return true;
  return typeof value === "number" && !(isGiven(low) && value < Number(low)) && !(isGiven(high) && value > Number(high));
}

function compared(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return a < b ? -1 : a > b ? 1 : 0;
}
