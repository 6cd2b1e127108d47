// The tokens of a rollout, coloured by a column. Tokens that are not trained on are dim.

import { category, css, diverging, intensity } from "viewer/colors";
import { fill, h, key, longText, number, select } from "viewer/dom";

const AT_FIRST = 4000;

// title, how a value becomes a colour, and what the colour means
const COLUMNS = {
  logprobs: { title: "log-prob (engine)", color: intensity, note: "stronger: less probable" },
  trainer_logprobs: { title: "log-prob (trainer)", color: intensity, note: "stronger: less probable" },
  difference: { title: "trainer − engine", color: diverging, note: "blue: the trainer gives more, orange: less" },
  advantages: { title: "advantage", color: diverging, note: "blue: made more probable, orange: less" },
  entropy: { title: "entropy", color: intensity, note: "stronger: less certain" },
  versions: { title: "policy version", color: category, note: "one colour for each version; no colour: only read" },
};

export function tokenView(recorded, by, choose) {
  const sequences = recorded.map(withValues);
  const columns = Object.keys(COLUMNS).filter((each) => sequences.some(({ values }) => values[each].some(isKnown)));
  if (!columns.length) return h("p", { class: "note" }, "This rollout's tokens have no values.");
  const name = columns.includes(by) ? by : columns[0];
  const size = sizeOf(sequences.flatMap((sequence) => sequence.values[name].filter((value, at) => isKnown(value) && isTrained(sequence, at))));
  const told = h("p", { class: "told", role: "status" }, "Point at a token, or go through them with the arrows.");
  const choice = select("colour by", columns.map((each) => [each, COLUMNS[each].title]), name, choose);
  const box = h("div", {}, h("div", { class: "toolbar small" }, choice, h("small", {}, COLUMNS[name].note)), legend(name, size, sequences), told);
  for (const sequence of sequences) box.append(sequences.length > 1 ? h("h3", {}, `sequence ${sequence.sequence}`) : "", strip(sequence, name, size, told));
  return box;
}

// A sequence with its values by column. Tokens that the model only read have none, whatever fills their places.
function withValues(sequence) {
  const { logprobs, trainer_logprobs: trained } = sequence;
  const columns = { ...sequence, difference: logprobs && trained && logprobs.map((value, at) => (isKnown(value) && isKnown(trained[at]) ? trained[at] - value : null)) };
  const values = Object.keys(COLUMNS).map((name) => [name, (columns[name] ?? []).map((value, at) => (isWritten(sequence, at) ? value : null))]);
  return { ...sequence, values: Object.fromEntries(values) };
}

function isWritten({ versions, mask }, at) {
  return versions ? versions[at] >= 0 : !mask || mask[at];
}

function isTrained(sequence, at) {
  return isWritten(sequence, at) && (!sequence.mask || sequence.mask[at]);
}

function strip(sequence, name, size, told) {
  const element = h("div", { class: "tokens", dir: "auto", tabindex: "0", role: "group", "aria-label": `tokens of sequence ${sequence.sequence}; the arrows go through them` }, longText(sequence.before));
  const add = (from, to) => {
    const part = document.createDocumentFragment();
    for (let at = from; at < Math.min(to, sequence.ids.length); at += 1) part.append(token(sequence, at, colorOf(name, sequence.values[name][at], size)));
    if (to < sequence.ids.length) part.append(h("button", { type: "button", class: "more", on: { click: (event) => { event.target.remove(); add(to, to + 5 * AT_FIRST); } } }, `Show more of ${number(sequence.ids.length)} tokens`));
    element.append(part);
  };
  add(0, AT_FIRST);
  let current = null;
  const tell = (at) => {
    current?.classList.remove("current");
    current = element.querySelector(`[data-at="${at}"]`);
    current?.classList.add("current");
    if (current) fill(told, describe(sequence, at));
  };
  element.addEventListener("mouseover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) tell(Number(at));
  });
  element.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20, Home: -Infinity }[event.key];
    if (by === undefined || event.target !== element) return;
    event.preventDefault();
    event.stopPropagation(); // these keys do not leave the rollout here
    tell(Math.max(0, Math.min(sequence.ids.length - 1, Number(current?.dataset.at ?? -1) + by)));
    current?.scrollIntoView({ block: "nearest" });
  });
  return element;
}

function token(sequence, at, color) {
  const element = document.createElement("span");
  element.textContent = sequence.pieces[at] || "·";
  element.dataset.at = at;
  if (!sequence.pieces[at]) element.classList.add("part"); // a part of a character, which an earlier token shows
  if (!isTrained(sequence, at)) element.classList.add("masked");
  else element.style.backgroundColor = color;
  return element;
}

function colorOf(name, value, size) {
  return isKnown(value) ? COLUMNS[name].color(value, size) : "transparent";
}

function describe(sequence, at) {
  const { ids, pieces, values } = sequence;
  const known = Object.entries(COLUMNS).map(([name, { title }]) => [title, values[name][at]]).filter(([, value]) => isKnown(value));
  const facts = [["token", `${at} of ${ids.length}`], ["id", String(ids[at])], ...known.map(([title, value]) => [title, number(value)])];
  if (isKnown(values.logprobs[at])) facts.push(["probability", `${(100 * Math.exp(values.logprobs[at])).toPrecision(3)} %`]);
  if (!isWritten(sequence, at)) facts.push(["", "read, not written by the model"]);
  else if (!isTrained(sequence, at)) facts.push(["", "not trained on"]);
  return [h("code", {}, JSON.stringify(pieces[at].slice(0, 60))), facts.map(([title, value]) => h("span", {}, title && h("small", {}, title), ` ${value}`))];
}

function legend(name, size, sequences) {
  const dim = h("span", { class: "tokens" }, h("span", { class: "masked" }, "not trained on"));
  if (name === "versions") {
    const seen = [...new Set(sequences.flatMap(({ values }) => values.versions.filter(isKnown)))].sort((a, b) => a - b);
    return h("p", { class: "legend" }, seen.map((value) => key(category(value), `version ${value}`)), dim);
  }
  const { color } = COLUMNS[name];
  const ends = color === diverging ? [-size, 0, size] : [0, size / 2, size];
  const stops = ends.map((value) => (value ? color(value, size) : css("--panel")));
  const first = color === diverging ? number(-size, 2) : "0";
  const isNegative = name.includes("logprobs");
  return h("p", { class: "legend" }, first, h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } }), isNegative ? number(-size, 2) : number(size, 2), dim);
}

// The strongest colour is for the 98th percentile, so that one outlier does not pale the rest.
function sizeOf(values) {
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) : 0;
}

function isKnown(value) {
  return value !== null && value !== undefined;
}
