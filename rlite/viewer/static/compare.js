// One prompt over steps and over runs, with the difference of two answers; and the configs.

import { ask, isExport } from "viewer/api";
import { colorOfRun, range, scale } from "viewer/colors";
import { difference, side } from "viewer/diff";
import { card, empty, fill, groupedBy, h, longText, mean, number, rowsOf, scroller, select } from "viewer/dom";
import { sourceName, statusChip, withoutRecord } from "viewer/place";

const MAX_LISTED = 300;
const MAX_COMPARED = 200_000; // characters of an answer
const PAUSE_MS = 300; // of the reader, after which the server searches
const natural = new Intl.Collator("en", { numeric: true });
let latest = { key: "", found: null }; // the last search of the server

export async function render(parameters, app, signal) {
  const runs = app.runs;
  const { items, isPartial } = await itemsOf(app);
  const known = items.filter((each) => each.item === parameters.item && (!parameters.set || each.set === parameters.set));
  const chosen = parameters.item === undefined ? items[0] : known[0] ?? { set: parameters.set ?? "", item: parameters.item };
  const body = h("div", { class: "page" }, h("h1", { class: "hidden" }, "Compare"));
  const news = h("p", { class: "news", role: "status" });
  if (!chosen) body.append(card("Answers to one prompt", empty("No rollouts are recorded", ...withoutRecord(app.runs))), ...[await configs(app)].filter(Boolean));
  else body.append(news, await promptCards({ items, isPartial, chosen, parameters, app, signal }), ...[await configs(app)].filter(Boolean));
  const before = document.querySelector(".items")?.scrollTop ?? 0;
  const renew = () => {
    if (amounts(runs) === amounts(app.runs)) return;
    if (!chosen) app.again();
    else if (!news.firstChild) fill(news, h("button", { type: "button", class: "more", on: { click: () => app.go("compare", { ...parameters, find: body.querySelector("input[type=search]").value }, { replace: true }) } }, "More rollouts are recorded: show them"));
  };
  return { body, renew, shown: () => reveal(body.querySelector(".items"), before) };
}

// How many rollouts the sources of all runs have.
function amounts(runs) {
  return JSON.stringify(runs.map(({ sources }) => Object.entries(sources).map(([name, { rollouts }]) => [name, rollouts])));
}

async function promptCards({ items, isPartial, chosen, parameters, app, signal }) {
  const finder = new Finder({ items, chosen, app, signal });
  const open = async (event) => {
    if (event.key !== "Enter") return;
    const text = event.target.value;
    await finder.find(text, 0);
    const [first] = finder.shown;
    if (first && text === event.target.value) app.go("compare", { set: first.set, item: first.item, find: text }, { replace: true });
  };
  const search = h("input", { type: "search", placeholder: "Find by id or text", "aria-label": "Find a prompt by id or text", title: "Enter opens the first one", value: parameters.find, on: { input: (event) => finder.find(event.target.value, PAUSE_MS), keydown: open } });
  finder.find(parameters.find ?? "", 0);
  if (isPartial) finder.readOn(search);
  const attempts = await attemptsOf(app, chosen);
  return h("div", { class: "columns compare" },
    card("Prompts", h("p", { class: "note" }, app.runs.length > 1 ? "Prompts whose mean reward differs most between the first and the last run that tried them come first." : "Prompts whose mean reward changed most, from the first to the last try, come first."), search, finder.told, finder.list),
    h("div", { class: "wide" }, answersCard(chosen, attempts, parameters, app)));
}

// Prompts that have a text: those of the loaded list at once, those of the whole record when the reader pauses.
class Finder {
  constructor(place) {
    Object.assign(this, place);
    this.list = h("nav", { class: "items", "aria-label": "Prompts" });
    this.told = h("p", { class: "note", role: "status" });
    this.shown = [];
    this.signal.addEventListener("abort", () => this.end());
  }

  // Asks until the server has read the prompts of the whole list, and shows them.
  async readOn(search) {
    for (let round = 1, isPartial = true; isPartial && !this.signal.aborted; round += 1) {
      const found = await itemsOf(this.app, "", this.signal, round).catch(() => ({ items: this.items, isPartial: false }));
      ({ items: this.items, isPartial } = found);
      if (!search.value && !this.signal.aborted) this.find("", 0);
    }
  }

  // Resolves when the server has answered, or has not to be asked.
  async find(text, pause) {
    this.end();
    const isWhole = !text || isExport(); // nothing is left to ask
    this.draw(this.items.filter((each) => isLike(each, text)), { text, isWhole });
    if (isWhole) return;
    const { signal } = (this.asked = new AbortController());
    const found = await delay(pause, signal).then(() => this.search(text, signal)).catch((error) => ({ error }));
    if (signal.aborted) return; // the reader has typed on
    if (found.error) this.told.textContent = `The recorded prompts cannot be searched: ${found.error.message}`;
    else this.draw(found.items, { text, isWhole: true, isCut: found.isCut });
  }

  // The last search is kept: a page that opens one of its prompts shows it again.
  async search(text, signal) {
    const key = JSON.stringify([text, amounts(this.app.runs)]);
    if (latest.key === key) return latest.found;
    this.told.textContent = "Searching the recorded prompts";
    const found = await itemsOf(this.app, text, signal);
    latest = { key, found };
    return found;
  }

  draw(found, { text, isWhole, isCut = false }) {
    this.shown = found;
    this.told.textContent = isCut ? "The record is long: only the texts of its newest part were searched." : "";
    fill(this.list, found.length ? found.slice(0, MAX_LISTED).map((each) => itemLink(each, this.chosen, text, this.app)) : isWhole && empty("No such prompt", "No recorded prompt has this id or this text."));
  }

  end() {
    this.asked?.abort();
  }
}

function delay(pause, signal) {
  return new Promise((done, fail) => {
    const clock = setTimeout(done, pause);
    signal.addEventListener("abort", () => {
      clearTimeout(clock);
      fail(signal.reason);
    });
  });
}

// Keeps the place of the list, with the chosen prompt in sight.
function reveal(list, before) {
  const current = list?.querySelector("[aria-current]");
  if (!current) return;
  const top = current.offsetTop - list.offsetTop;
  const isSeen = top >= before && top + current.offsetHeight <= before + list.clientHeight;
  list.scrollTop = isSeen ? before : top - list.clientHeight / 3;
}

// Prompts of all runs, the most changed first; one that several runs have tried counts for all of them. With a text the
// server looks for it; an exported file has one list of each run, without one. `round` asks again for what is not read yet.
async function itemsOf(app, text = "", signal = null, round = 0) {
  const found = new Map();
  let [isCut, isPartial] = [false, false];
  for (const [run] of app.runs.entries()) {
    const answer = await ask("items", { run, text, ...(round && { round }) }, signal);
    isCut ||= answer.is_cut;
    isPartial ||= answer.is_partial;
    for (const { set, item, prompt, step_count_distinct: steps, count, first, last } of rowsOf(answer.items)) {
      const key = JSON.stringify([set, item]);
      const before = found.get(key);
      found.set(key, { set, item, prompt: before?.prompt ?? prompt, steps: (before?.steps ?? 0) + steps, runs: (before?.runs ?? 0) + 1, number: (before?.number ?? 0) + count,
        first: before ? before.firstLast ?? before.last : first, firstLast: before?.firstLast ?? before?.last, last });
    }
  }
  const change = ({ first, last }) => (typeof first === "number" && typeof last === "number" ? Math.abs(last - first) : -1);
  const order = (a, b) => change(b) - change(a) || b.runs - a.runs || b.steps - a.steps || b.number - a.number || natural.compare(a.set, b.set) || natural.compare(a.item, b.item);
  return { items: [...found.values()].sort(order), isCut, isPartial };
}

function isLike({ item, prompt }, text) {
  return `${item}\n${prompt ?? ""}`.toLowerCase().includes(text.toLowerCase());
}

function itemLink({ set, item, prompt, steps, runs, number: count, first, last }, chosen, find, app) {
  const facts = [item, setName(set), steps > 1 && counted(steps, "step"), counted(count, "rollout"), runs > 1 && `${runs} runs`];
  return h("a", { href: app.link("compare", { set, item, find }), "aria-current": item === chosen.item && set === chosen.set ? "true" : null },
    h("span", { dir: "auto" }, prompt || h("i", {}, `prompt ${item}, whose text is not recorded or was not read`)), changed(first, last), h("small", {}, facts.filter(Boolean).join(" · ")));
}

// The mean reward at first and at last.
function changed(first, last) {
  if (typeof last !== "number") return null;
  if (typeof first !== "number") return h("b", { class: "change" }, number(last, 2));
  return h("b", { class: "change" }, `${number(first, 2)} → ${number(last, 2)}`, h("i", { "aria-hidden": "true" }, last > first ? " ▲" : last < first ? " ▼" : ""));
}

// A set that several models of an evaluation answered has no name of its own.
function setName(set) {
  return set.startsWith("questions ") ? "" : sourceName(set);
}

// An evaluation of finished models has no steps.
function stepName({ run, step }, app) {
  return step || app.runs[run].last_step ? `step ${step}` : "";
}

async function attemptsOf(app, { set, item }) {
  const [found, missing] = [[], []];
  for (const [run] of app.runs.entries()) {
    const answer = await ask("item", { run, set, item }).catch((error) => {
      missing.push(h("p", { class: "note" }, app.runs.length > 1 && `${app.runs[run].name}: `, error.message));
      return [];
    });
    for (const { source, columns } of answer) for (const row of rowsOf(columns)) found.push({ run, source, ...row });
  }
  return { missing, attempts: found.map((attempt, index) => ({ ...attempt, index })).sort((a, b) => a.run - b.run || a.step - b.step) };
}

function answersCard(chosen, { attempts, missing }, parameters, app) {
  const name = `prompt ${chosen.item}${setName(chosen.set) && ` (${setName(chosen.set)})`}`;
  if (!attempts.length) return card(`Answers to ${name}`, missing.length ? missing : empty("No such prompt", "No recorded rollout has this id."));
  const key = ({ run, source, step, group, sample }) => [run, source, step, group, sample].join("/");
  const find = (text, other) => attempts.find((attempt) => key(attempt) === text) ?? other;
  const first = find(parameters.a, attempts[0]);
  const second = find(parameters.b, attempts.at(-1));
  const limits = range(attempts.map((attempt) => attempt.reward));
  const lines = [...groupedBy(attempts, ({ run, source, step }) => `${run}/${source}/${step}`).values()].map((own) => h("tr", {},
    app.runs.length > 1 && h("td", {}, h("i", { class: "dot", style: { background: colorOfRun(own[0].run) } }), app.runs[own[0].run].name),
    h("td", {}, sourceName(own[0].source)), h("td", { class: "number" }, stepName(own[0], app)),
    h("td", {}, h("span", { class: "cells" }, own.map((attempt) => attemptCell(attempt, { first, second, limits, key, app, parameters, chosen })))),
    h("td", { class: "number" }, number(mean(own.map((attempt) => attempt.reward)), 3))));
  const prompt = h("div", { class: "prompts" });
  const texts = h("div", { class: "diff", "aria-busy": "true" });
  drawPrompts(prompt, [first, second], attempts);
  drawDifference(texts, [first, second], app);
  return card(`Answers to ${name}`,
    h("p", { class: "note" }, "Each row is a step, with its mean reward at the end. Each cell is an answer, stronger with its reward; an empty cell has none."),
    h("div", { class: "toolbar small" }, select("a cell chooses", [["", "answer A"], ["b", "answer B"]], parameters.pick ?? "", (pick) => app.go("compare", { ...parameters, pick }, { replace: true })), h("small", {}, "With Shift it chooses the other one.")),
    missing,
    scroller("tries of this prompt", {}, h("table", { class: "narrow tries" }, h("tbody", {}, lines))), prompt, texts);
}

function attemptCell(attempt, { first, second, limits, key, app, parameters: { find, pick }, chosen: { set, item } }) {
  const mark = attempt === first && attempt === second ? "AB" : attempt === first ? "A" : attempt === second ? "B" : "";
  const isB = (event) => event.shiftKey !== (pick === "b");
  const choose = (event) => app.go("compare", { set, item, find, pick, a: key(isB(event) ? first : attempt), b: key(isB(event) ? attempt : second) }, { replace: true });
  return h("button", {
    type: "button", class: `cell${mark ? " marked" : ""}`, title: `sample ${attempt.sample}: reward ${number(attempt.reward)}`,
    "aria-label": `step ${attempt.step} sample ${attempt.sample}, reward ${number(attempt.reward)}${mark ? `, ${mark}` : ""}`,
    style: { "background-color": scale(attempt.reward, ...limits) }, on: { click: choose },
  }, mark);
}

// The prompt of both answers; both prompts if they differ. Rollouts near them may have it if theirs is not recorded.
async function drawPrompts(box, chosen, attempts) {
  const texts = (await Promise.all(chosen.map(promptOf))).filter(Boolean);
  for (const other of [attempts[0], ...attempts.slice(-3).reverse()]) if (!texts.length) texts.push(...[await promptOf(other)].filter(Boolean));
  const distinct = [...new Set(texts)];
  fill(box, distinct.length > 1 && h("p", { class: "note" }, "These two rollouts answer different prompts of the same id."),
    distinct.map((text) => h("div", { class: "prompt text", dir: "auto", tabindex: "0", role: "region", "aria-label": "prompt" }, longText(text, 4000))));
}

async function promptOf({ run, source, step, group, sample }) {
  const found = await ask("sample", { run, source, step, group, sample }).catch(() => null);
  return (found?.row.segments ?? []).filter((segment) => segment.role === "prompt").map((segment) => segment.text).join("");
}

async function drawDifference(box, chosen, app) {
  const found = await Promise.all(chosen.map(answerText));
  const [texts, notes] = [found.map(({ text }) => text), found.map(({ note }) => note !== "" && h("p", { class: "note" }, note))];
  const heads = chosen.map(({ run, source, step, group, sample, reward, status }, index) => h("h3", {}, h("b", {}, "AB"[index]), " ",
    h("a", { href: app.link("sample", { run, source, step, group, sample }) }, `${app.runs.length > 1 ? `${app.runs[run].name}, ` : ""}${[sourceName(source), stepName({ run, step }, app)].filter(Boolean).join(", ")}, sample ${sample}`),
    h("small", {}, `reward ${number(reward)}`), statusChip(status)));
  const isKnown = texts.every((text) => text !== null);
  const { parts, isRough } = isKnown ? difference(...texts) : { parts: [], isRough: false };
  const bodies = texts.map((text, index) => text !== null && h("div", { class: "text", dir: "auto" }, isKnown ? side(parts, index ? "new" : "gone") : text));
  fill(box, isRough && h("p", { class: "note" }, "These answers have too little in common to compare them word by word: everything between their beginning and their end is shown as replaced."),
    chosen.map((_, index) => h("section", {}, heads[index], notes[index], bodies[index])));
  box.removeAttribute("aria-busy");
}

// The text of an answer, null if it is not known, and what the reader has to know about it.
async function answerText({ run, source, step, group, sample }) {
  const found = await ask("sample", { run, source, step, group, sample }).catch((error) => ({ error }));
  if (found.error) return { text: null, note: found.error.message };
  const { segments } = found.row;
  if (!segments) return { text: null, note: "The text of this rollout is not recorded." };
  const text = segments.filter((segment) => segment.role !== "prompt").map((segment) => segment.text).join("");
  if (text.length <= MAX_COMPARED) return { text, note: "" };
  return { text: text.slice(0, MAX_COMPARED), note: `The first ${number(MAX_COMPARED)} of ${number(text.length)} characters are compared. The page Sample shows all.` };
}

// Options of the runs: those that users have set, those that differ, or all.
async function configs(app) {
  const all = await Promise.all(app.runs.map((_, run) => ask("config", { run })));
  const names = [...new Set(all.flatMap((config) => Object.keys(config)))].sort();
  if (!names.length && app.runs.every((run) => run.is_evaluation || run.is_unfinished_evaluation)) return null;
  if (!names.length) return card("Options", empty("No options", "A trainer writes config.yaml into the folder of its run."));
  const told = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && value && Math.abs(value) < 1e-4 ? value.toExponential() : String(value));
  const differs = (name) => new Set(all.map((config) => told(config[name]))).size > 1;
  const several = app.runs.length > 1;
  const known = app.runs.map(({ begun }) => begun.set).filter(Boolean);
  const given = new Set(known.flat());
  const kinds = {
    ...(known.length > 0 && { set: ["that were set", (name) => given.has(name)] }),
    ...(several && { differ: ["that differ", differs] }),
    all: ["all", () => true],
  };
  const rows = h("tbody");
  const count = h("p", { class: "note", role: "status" });
  let kind = Object.keys(kinds)[0];
  const search = h("input", { type: "search", placeholder: "Find an option", "aria-label": "Find an option" });
  const draw = () => {
    const shown = names.filter((name) => name.includes(search.value) && kinds[kind][1](name));
    count.textContent = `${counted(shown.length, "option")}${several ? `, ${shown.filter(differs).length} of them different` : ""}${known.length < app.runs.length && kind !== "all" && known.length > 0 ? "; a run of an earlier version does not say which were set" : ""}`;
    fill(rows, shown.map((name) => h("tr", { class: differs(name) ? "differs" : "" }, h("th", { scope: "row" }, name), all.map((config, run) =>
      h("td", { class: app.runs[run].begun.set?.includes(name) ? "set" : "" }, told(config[name]))))));
  };
  search.addEventListener("input", draw);
  draw();
  const choice = select("options", Object.entries(kinds).map(([name, [title]]) => [name, title]), kind, (value) => { kind = value; draw(); });
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "option"), app.runs.map((run) => h("th", { scope: "col" }, run.name))));
  const note = several ? "Values that the user of a run has set are bold; the others are defaults." : "Open two runs to compare them: rlite view RUN RUN2";
  return card("Options", h("p", { class: "note" }, note), h("div", { class: "toolbar small" }, choice, search, count), scroller("options", { class: "scroll whole" }, h("table", { class: "options" }, head, rows)));
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}
