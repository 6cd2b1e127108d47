// The tokens of a rollout, coloured by a column. Tokens that are not trained on are dim.

import { category, css, diverging, intensity } from "viewer/colors";
import { fill, h, key, longText, number, select } from "viewer/dom";

const AT_FIRST = 4000;

// name, values of a sequence, and how a value becomes a colour
const COLUMNS = {
  logprobs: { title: "log-prob (engine)", of: (s) => s.logprobs, color: intensity, note: "stronger: less probable" },
  trainer_logprobs: { title: "log-prob (trainer)", of: (s) => s.trainer_logprobs, color: intensity, note: "stronger: less probable" },
  difference: { title: "trainer − engine", of: (s) => s.logprobs && s.trainer_logprobs && s.logprobs.map((value, at) => difference(s.trainer_logprobs[at], value)), color: diverging, note: "blue: the trainer gives more, orange: less" },
  advantages: { title: "advantage", of: (s) => s.advantages, color: diverging, note: "blue: made more probable, orange: less" },
  entropy: { title: "entropy", of: (s) => s.entropy, color: intensity, note: "stronger: less certain" },
  versions: { title: "policy version", of: (s) => s.versions, color: (value) => (value < 0 ? "transparent" : category(value)), note: "one colour for each version; no colour: only read" },
};

export function tokenView(sequences, by, choose) {
  const columns = Object.entries(COLUMNS).filter(([, column]) => sequences.some((sequence) => known(column.of(sequence)).length));
  if (!columns.length) return h("p", { class: "note" }, "This rollout's tokens have no values.");
  const [name, column] = columns.find(([each]) => each === by) ?? columns[0];
  const told = h("p", { class: "told", role: "status" }, "Point at a token.");
  const box = h("div", {}, h("div", { class: "toolbar small" }, select("colour by", columns.map(([each, { title }]) => [each, title]), name, choose), h("small", {}, column.note)), legend(name, column, sequences), told);
  for (const sequence of sequences) box.append(sequences.length > 1 ? h("h3", {}, `sequence ${sequence.sequence}`) : "", strip(sequence, column, columns, told));
  return box;
}

function strip(sequence, column, columns, told) {
  const values = column.of(sequence);
  const size = sizeOf(known(values));
  const element = h("div", { class: "tokens", dir: "auto" }, longText(sequence.before));
  const add = (from, to) => {
    const part = document.createDocumentFragment();
    for (let at = from; at < Math.min(to, sequence.ids.length); at += 1) part.append(token(sequence, at, column.color(values?.[at], size)));
    if (to < sequence.ids.length) part.append(h("button", { type: "button", class: "more", on: { click: (event) => { event.target.remove(); add(to, to + 5 * AT_FIRST); } } }, `Show more of ${number(sequence.ids.length)} tokens`));
    element.append(part);
  };
  add(0, AT_FIRST);
  element.addEventListener("mouseover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) fill(told, describe(sequence, Number(at), columns));
  });
  return element;
}

function token(sequence, at, color) {
  const element = document.createElement("span");
  element.textContent = sequence.pieces[at] || "·";
  element.dataset.at = at;
  if (!sequence.pieces[at]) element.classList.add("part"); // a part of a character, which an earlier token shows
  if (sequence.mask && !sequence.mask[at]) element.classList.add("masked");
  else element.style.backgroundColor = color;
  return element;
}

function describe(sequence, at, columns) {
  const values = columns.map(([, column]) => [column.title, column.of(sequence)?.[at]]).filter(([, value]) => value !== null && value !== undefined);
  const probability = sequence.logprobs?.[at];
  const facts = [["token", `${at} of ${sequence.ids.length}`], ["id", String(sequence.ids[at])], ...values.map(([title, value]) => [title, number(value)])];
  if (typeof probability === "number" && (!sequence.mask || sequence.mask[at])) facts.push(["probability", `${(100 * Math.exp(probability)).toPrecision(3)} %`]);
  if (sequence.mask && !sequence.mask[at]) facts.push(["", "not trained on"]);
  return [h("code", {}, JSON.stringify(sequence.pieces[at].slice(0, 60))), facts.map(([title, value]) => h("span", {}, title && h("small", {}, title), ` ${value}`))];
}

function legend(name, column, sequences) {
  if (name === "versions") {
    const seen = [...new Set(sequences.flatMap((sequence) => known(sequence.versions)))].filter((value) => value >= 0).sort((a, b) => a - b);
    return h("p", { class: "legend" }, seen.map((value) => key(category(value), `version ${value}`)), h("span", { class: "tokens" }, h("span", { class: "masked" }, "not trained on")));
  }
  const size = sizeOf(sequences.flatMap((sequence) => known(column.of(sequence))));
  const ends = column.color === diverging ? [-size, 0, size] : [0, size / 2, size];
  const stops = ends.map((value) => (value ? column.color(value, size) : css("--panel")));
  const first = column.color === diverging ? number(-size, 2) : "0";
  const isNegative = name.includes("logprobs");
  return h("p", { class: "legend" }, first, h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } }), isNegative ? number(-size, 2) : number(size, 2), h("span", { class: "tokens" }, h("span", { class: "masked" }, "not trained on")));
}

// The strongest colour is for the 98th percentile, so that one outlier does not pale the rest.
function sizeOf(values) {
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) : 0;
}

function known(values) {
  return (values ?? []).filter((value) => value !== null);
}

function difference(a, b) {
  return a === null || b === null ? null : a - b;
}
