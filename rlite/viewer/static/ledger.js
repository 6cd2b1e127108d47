// Ledger: every rollout that was not trained on, by reason, with a link to each.

import { ask } from "viewer/api";
import { stackChart } from "viewer/charts";
import { STATUS } from "viewer/colors";
import { card, empty, fill, h, number, rowsOf, select, svg, words } from "viewer/dom";
import { noRecord, sourceName, statusChip } from "viewer/place";

const MEANINGS = {
  filtered: "all rewards of the group were equal",
  refused: "should_accept refused the group, or the workflow returned None",
  too_old: "max_head_offpolicyness forbids to train on it",
  failed: "the episode, or one of its group, raised an error until no attempt was left",
  timed_out: "the episode did not end in time",
  reward_killed: "the reward's process was killed, died, or broke its limits",
  aborted: "it was under way when the run ended, or a program or the engine cancelled it",
};

export async function render(parameters, app) {
  const run = Number(parameters.run ?? 0);
  const about = app.runs[run];
  if (!about || !Object.keys(about.sources).length) return { body: about ? noRecord(about) : empty("No such run") };
  const sources = Object.keys(about.sources);
  const source = sources.includes(parameters.source) ? parameters.source : sources[0];
  const ledger = await ask("ledger", { run, source });
  const go = (changes) => app.go("ledger", { run, source, ...changes }, { replace: true });
  const choices = h("div", { class: "toolbar" },
    app.runs.length > 1 && select("run", app.runs.map((each, index) => [index, each.name]), run, (value) => go({ run: value, source: "" })),
    sources.length > 1 && select("source", sources.map((name) => [name, sourceName(name)]), source, (value) => go({ source: value })),
    h("strong", {}, ledger.lost ? `${number(ledger.lost)} of ${number(ledger.rollouts)} rollouts were not ${source === "train" ? "trained on" : "counted"} (${percent(ledger.lost, ledger.rollouts)})` : `All ${number(ledger.rollouts)} rollouts were ${source === "train" ? "trained on" : "counted"}`));
  const body = h("div", { class: "page" }, choices, totals(ledger), chart(source, ledger), reasons(ledger, { run, source, app }));
  return { body };
}

function totals({ statuses, rollouts }) {
  const order = Object.keys(STATUS).filter((status) => statuses[status]);
  const bar = h("div", { class: "shares", role: "img", "aria-label": "shares of the rollouts by status" },
    order.map((status) => h("i", { title: `${words(status)}: ${number(statuses[status])}`, style: { background: STATUS[status], "flex-grow": statuses[status] } })));
  const list = order.map((status) => h("div", { class: "total", title: MEANINGS[status] }, statusChip(status), h("b", {}, number(statuses[status])), h("small", {}, percent(statuses[status], rollouts))));
  return card("What became of the rollouts", bar, h("div", { class: "totals" }, list));
}

function chart(source, { by_step: { steps, counts } }) {
  const layers = Object.entries(STATUS).filter(([status]) => counts[status] && !["trained", "evaluated"].includes(status)).map(([status, color]) => ({ label: words(status), color, values: counts[status] }));
  const note = counts.filtered ? "Filtered groups are replaced by design: all their rewards are equal." : "";
  return steps.length > 1 && stackChart(source === "train" ? "Not trained on, by step" : "Not counted, by step", steps, layers, { note });
}

function reasons(ledger, place) {
  if (!ledger.kinds.length) return card("Reasons", empty("No reasons", "Every rollout was used."));
  const most = ledger.kinds[0].count_all;
  const rows = ledger.kinds.map((row) => kindRow(row, most, place));
  const note = ledger.num_kinds > ledger.kinds.length ? `the ${ledger.kinds.length} most frequent of ${number(ledger.num_kinds)} kinds` : "A click lists the rollouts of a reason.";
  return card("Reasons", h("p", { class: "note" }, note), h("div", { class: "reasons" }, rows));
}

// Reasons of one kind below each other; a single one stands for its kind.
function kindRow(row, most, place) {
  if (row.reason_count_distinct === 1) return reasonRow({ ...row, reason: row.reason_min }, most, place);
  const why = `${row.kind || MEANINGS[row.status] || ""} (${number(row.reason_count_distinct)} reasons)`;
  return opening(row, most, why, "kind", (list) => showReasons(list, row, place, 0));
}

function reasonRow(row, most, place) {
  return opening(row, most, row.reason || MEANINGS[row.status] || "", "places", (list) => showPlaces(list, row, place, 0));
}

function opening(row, most, why, kind, show) {
  const list = h("div", { class: kind });
  const details = h("details", {},
    h("summary", {},
      statusChip(row.status), h("span", { class: "why" }, why),
      spark(row.steps), h("small", {}, row.step_min === row.step_max ? `step ${row.step_min}` : `steps ${row.step_min} – ${row.step_max}`),
      h("span", { class: "amount" }, h("i", { class: "bar", style: { width: `${(100 * row.count_all) / most}%`, background: STATUS[row.status] ?? "#888" } })), h("b", {}, number(row.count_all))), list);
  details.addEventListener("toggle", () => details.open && !list.childElementCount && show(list));
  return details;
}

// How often in each step, as small bars.
function spark(steps) {
  const known = Object.entries(steps).map(([step, count]) => [Number(step), count]);
  const [first, last] = [known[0][0], known.at(-1)[0]];
  const most = Math.max(...known.map(([, count]) => count));
  const width = 80 / Math.max(1, last - first + 1);
  return svg("svg", { viewBox: "0 0 80 18", class: "spark", "aria-hidden": "true" }, known.slice(0, 400).map(([step, count]) => svg("rect", { x: (step - first) * width, y: 18 - (16 * count) / most, width: Math.max(0.8, width - 0.5), height: (16 * count) / most })));
}

async function showReasons(list, row, place, offset) {
  const { run, source } = place;
  const answer = await ask("ledger_reasons", { run, source, status: row.status, kind: row.kind, offset }).catch((error) => ({ error, reasons: [], number: 0 }));
  const own = answer.reasons.map((reason) => reasonRow(reason, row.count_all, place));
  extend(list, own, answer, offset, (next) => showReasons(list, row, place, next));
}

async function showPlaces(list, row, place, offset) {
  const { run, source, app } = place;
  const answer = await ask("ledger_rows", { run, source, status: row.status, reason: row.reason, offset }).catch((error) => ({ error, columns: {}, number: 0 }));
  const links = rowsOf(answer.columns).map(({ step, group, sample, reward, item }) => h("a", { class: "chip", title: `item ${item}, reward ${number(reward)}`, href: app.link("sample", { run, source, step, group, sample }) }, `step ${step} · group ${group} · sample ${sample}`));
  extend(list, links, answer, offset, (next) => showPlaces(list, row, place, next));
}

// Adds a page of a list, with a button for the next one.
function extend(list, own, answer, offset, show) {
  const next = offset + own.length;
  const more = next < answer.number && own.length > 0 && h("button", { type: "button", class: "more", on: { click: (event) => { event.target.remove(); show(next); } } }, `Show more of ${number(answer.number)}`);
  list.append(...own, ...[more, answer.error && answer.error.message].filter(Boolean));
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}
