// One prompt over steps and over runs, with the difference of two answers; and the configs.

import { ask } from "viewer/api";
import { range, scale, SERIES } from "viewer/colors";
import { difference, side } from "viewer/diff";
import { card, empty, fill, groupedBy, h, longText, number, rowsOf } from "viewer/dom";
import { statusChip } from "viewer/rollouts";

export async function render(parameters, app) {
  const items = await itemsOf(app, "");
  const chosen = parameters.item ?? items[0]?.item;
  const body = h("div", { class: "page" });
  const search = h("input", { type: "search", placeholder: "Find a prompt by its id", "aria-label": "Find a prompt by its id", on: { change: (event) => find(event.target.value) } });
  const list = h("div", { class: "items" });
  const find = async (text) => drawItems(list, await itemsOf(app, text), chosen, app);
  drawItems(list, items, chosen, app);
  const attempts = chosen === undefined ? [] : await attemptsOf(app, chosen);
  const prompts = items.length || chosen !== undefined
    ? h("div", { class: "columns compare" }, card("Prompts", h("p", { class: "note" }, "those that were tried in most steps come first"), search, list), h("div", { class: "wide" }, answersCard(chosen, attempts, parameters, app)))
    : card("Answers to one prompt", empty("No rollouts are recorded", "A run records them with trainer.record=sample or all."));
  fill(body, prompts, await configs(app));
  return { body };
}

// Prompts of all runs; one that several runs have tried counts for all of them.
async function itemsOf(app, text) {
  const found = new Map();
  for (const [run] of app.runs.entries()) {
    const answer = await ask("items", { run, text }).catch(() => ask("items", { run, text: "" }));
    for (const row of rowsOf(answer.items)) {
      if (text && !row.item.toLowerCase().includes(text.toLowerCase())) continue;
      const before = found.get(row.item) ?? { item: row.item, steps: 0, runs: 0, number: 0 };
      found.set(row.item, { ...before, steps: before.steps + row.step_count_distinct, runs: before.runs + 1, number: before.number + row.step_count });
    }
  }
  return [...found.values()].sort((a, b) => b.runs - a.runs || b.steps - a.steps || b.number - a.number);
}

function drawItems(list, items, chosen, app) {
  fill(list, items.length ? items.slice(0, 300).map(({ item, steps, runs, number: count }) =>
    h("a", { href: app.link("compare", { item }), "aria-current": item === chosen ? "true" : null },
      h("span", {}, item), h("small", {}, `${counted(steps, "step")}, ${counted(count, "rollout")}${runs > 1 ? `, ${runs} runs` : ""}`))) : empty("No such prompt", "No recorded rollout has such an id."));
}

async function attemptsOf(app, item) {
  const found = [];
  for (const [run] of app.runs.entries()) {
    const answer = await ask("item", { run, item }).catch(() => []);
    for (const { source, columns } of answer) for (const row of rowsOf(columns)) found.push({ run, source, ...row });
  }
  return found.map((attempt, index) => ({ ...attempt, index })).sort((a, b) => a.run - b.run || a.step - b.step);
}

function answersCard(item, attempts, parameters, app) {
  if (!attempts.length) return card(`Answers to ${item}`, empty("No such prompt", "No recorded rollout has this id."));
  const key = ({ run, source, step, group, sample }) => [run, source, step, group, sample].join("/");
  const find = (text, other) => attempts.find((attempt) => key(attempt) === text) ?? other;
  const first = find(parameters.a, attempts[0]);
  const second = find(parameters.b, attempts.at(-1));
  const limits = range(attempts.map((attempt) => attempt.reward));
  const lines = [...groupedBy(attempts, ({ run, source, step }) => `${run}/${source}/${step}`).values()].map((own) => h("tr", {},
    app.runs.length > 1 && h("td", {}, h("i", { class: "dot", style: { background: SERIES[own[0].run % SERIES.length] } }), app.runs[own[0].run].name),
    h("td", {}, own[0].source === "train" ? "" : own[0].source), h("td", { class: "number" }, `step ${own[0].step}`),
    h("td", {}, h("span", { class: "cells" }, own.map((attempt) => attemptCell(attempt, { first, second, limits, key, app, item })))),
    h("td", { class: "number" }, number(mean(own), 3))));
  const prompt = h("div", { class: "prompt text", dir: "auto" });
  const texts = h("div", { class: "diff", "aria-busy": "true" });
  drawPrompt(prompt, attempts);
  drawDifference(texts, [first, second], app);
  return card(`Answers to ${item}`,
    h("p", { class: "note" }, "A click chooses the left answer, Shift and click the right one. Each row is a step, with its mean reward."),
    h("div", { class: "scroll" }, h("table", { class: "narrow" }, h("tbody", {}, lines))), prompt, texts);
}

function attemptCell(attempt, { first, second, limits, key, app, item }) {
  const mark = attempt === first && attempt === second ? "AB" : attempt === first ? "A" : attempt === second ? "B" : "";
  const choose = (event) => app.go("compare", { item, a: key(event.shiftKey ? first : attempt), b: key(event.shiftKey ? attempt : second) }, { replace: true });
  return h("button", {
    type: "button", class: `cell${mark ? " marked" : ""}`, title: `sample ${attempt.sample}: reward ${number(attempt.reward)}`,
    "aria-label": `step ${attempt.step} sample ${attempt.sample}, reward ${number(attempt.reward)}${mark ? `, ${mark}` : ""}`,
    style: { "background-color": scale(attempt.reward, ...limits) }, on: { click: choose },
  }, mark);
}

// The prompt, from the first of a few rollouts whose text is recorded.
async function drawPrompt(box, attempts) {
  for (const { run, source, step, group, sample } of [attempts[0], ...attempts.slice(-3).reverse()]) {
    const found = await ask("sample", { run, source, step, group, sample }).catch(() => null);
    const text = (found?.row.segments ?? []).filter((segment) => segment.role === "prompt").map((segment) => segment.text).join("");
    if (text) {
      fill(box, longText(text, 4000));
      return;
    }
  }
  box.remove();
}

async function drawDifference(box, chosen, app) {
  const texts = await Promise.all(chosen.map(answerText));
  const heads = chosen.map(({ run, source, step, group, sample, reward, status }, index) => h("h3", {}, h("b", {}, "AB"[index]), " ",
    h("a", { href: app.link("sample", { run, source, step, group, sample }) }, `${app.runs.length > 1 ? `${app.runs[run].name}, ` : ""}${source === "train" ? "" : `${source}, `}step ${step}, sample ${sample}`),
    h("small", {}, `reward ${number(reward)}`), statusChip(status)));
  const isKnown = texts.every((text) => text !== null);
  const parts = isKnown ? difference(texts[0], texts[1]) : [];
  const bodies = texts.map((text, index) => h("div", { class: "text", dir: "auto" }, text === null ? h("p", { class: "note" }, "The text of this rollout is not recorded.") : isKnown ? side(parts, index ? "new" : "gone") : text));
  fill(box, h("section", {}, heads[0], bodies[0]), h("section", {}, heads[1], bodies[1]));
  box.removeAttribute("aria-busy");
}

async function answerText({ run, source, step, group, sample }) {
  const found = await ask("sample", { run, source, step, group, sample }).catch(() => null);
  const segments = found?.row.segments;
  return segments ? segments.filter((segment) => segment.role !== "prompt").map((segment) => segment.text).join("").slice(0, 200000) : null;
}

async function configs(app) {
  const all = await Promise.all(app.runs.map((_, run) => ask("config", { run })));
  const names = [...new Set(all.flatMap((config) => Object.keys(config)))].sort();
  if (!names.length) return card("Options", empty("No options", "A trainer writes config.yaml into the folder of its run."));
  const told = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const differs = (name) => new Set(all.map((config) => told(config[name]))).size > 1;
  const several = app.runs.length > 1;
  const rows = h("tbody");
  const draw = (text, onlyDifferent) => fill(rows, names.filter((name) => name.includes(text) && (!onlyDifferent || differs(name))).map((name) =>
    h("tr", { class: differs(name) ? "differs" : "" }, h("th", { scope: "row" }, name), all.map((config) => h("td", {}, told(config[name]))))));
  const search = h("input", { type: "search", placeholder: "Find an option", "aria-label": "Find an option" });
  const only = h("input", { type: "checkbox", checked: several });
  const renew = () => draw(search.value, only.checked);
  search.addEventListener("input", renew);
  only.addEventListener("change", renew);
  draw("", several);
  const count = names.filter(differs).length;
  const note = several ? (count ? `${count} options differ.` : "No option differs.") : "Open two runs to compare them: rlite view RUN RUN2";
  const head = h("thead", {}, h("tr", {}, h("th", {}, "option"), app.runs.map((run) => h("th", {}, run.name))));
  return card("Options", h("p", { class: "note" }, note), h("div", { class: "toolbar small" }, search, several && h("label", {}, only, "only those that differ")), h("div", { class: "scroll" }, h("table", { class: "options" }, head, rows)));
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function mean(rows) {
  const known = rows.map((row) => row.reward).filter((value) => value !== null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
