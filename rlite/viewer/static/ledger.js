// Ledger: every rollout that was not trained on, by reason, with a link to each.

import { ask } from "viewer/api";
import { renewCharts, stackChart } from "viewer/charts";
import { STATUS } from "viewer/colors";
import { arrange, card, compact, empty, fill, h, number, rowsOf, seconds, select, svg, words } from "viewer/dom";
import { News, placeOf, sourceName, statusChip } from "viewer/place";

const SPARK = 80; // bars of a small picture
const MEANINGS = {
  skipped: "its update was not made: not finite, or without a token to train on",
  filtered: "all rewards of the group were equal, and dynamic filtering replaced it",
  refused: "should_accept refused the group, the workflow returned None, its keys do not fit into the batch, or the trainer left it out",
  too_old: "older than rollout.max_head_offpolicyness allows",
  failed: "the episode, or one of its group, raised an error until no attempt was left",
  timed_out: "the episode did not end in time",
  reward_killed: "the reward's process was killed, died, or broke its limits",
  aborted: "it was under way when the run ended, a program or the engine cancelled it, its batch met a row that cannot be used, or the resumed run no longer runs ahead",
};

export async function render(parameters, app) {
  const { missing, run, about, source, sources } = placeOf(parameters, app, "ledger");
  if (missing) return missing;
  const news = new News("ledger", { app, run, source, about });
  const reasons = new Reasons({ run, source, app });
  const [count, shares, curves, audit] = [h("strong"), h("div", { class: "contents" }), h("div", { class: "contents" }), h("div", { class: "contents" })];
  const go = (changes) => app.go("ledger", { run, source, ...changes }, { replace: true });
  const choices = h("div", { class: "toolbar" }, h("h1", { class: "hidden" }, "Ledger"),
    app.runs.length > 1 && select("run", app.runs.map((each, index) => [index, each.name]), run, (value) => go({ run: value, source: "" })),
    sources.length > 1 && select("source", sources.map((name) => [name, sourceName(name)]), source, (value) => go({ source: value })),
    count, news.box);
  const draw = async () => {
    const ledger = await ask("ledger", { run, source });
    count.textContent = summary(ledger, source);
    fill(shares, totals(ledger));
    renewCharts(curves, [chart(source, ledger)].filter(Boolean));
    reasons.draw(ledger);
    fill(audit, audited(ledger.audit));
  };
  await draw();
  const renew = () => {
    news.tell();
    return draw().catch(() => {});
  };
  return { body: h("div", { class: "page" }, choices, shares, curves, reasons.box, audit), renew };
}

function summary({ lost, rollouts, kinds, sums }, source) {
  const use = source === "train" ? "trained on" : "counted";
  if (!lost) return `All ${number(rollouts)} rollouts were ${use}`;
  const [tokens, spent] = ["response_tokens_sum", "seconds_sum"].map((name) => kinds.reduce((sum, kind) => sum + (kind[name] ?? 0), 0));
  return `${number(lost)} of ${number(rollouts)} rollouts were not ${use} (${percent(lost, rollouts)}): ${compact(tokens)} tokens (${percent(tokens, sums.tokens)}) and ${seconds(spent)} of episodes (${percent(spent, sums.seconds)})`;
}

// What `rlite audit` has found; nothing if it was not run.
function audited(audit) {
  if (!audit) return null;
  const checks = Object.entries(audit.checked).map(([name, count]) => `${number(count)} ${name}`).join(", ");
  const found = audit.found.map(([place, problem]) => h("li", {}, h("b", {}, place), ` ${problem}`));
  const verdict = audit.number ? `${number(audit.number)} contradictions` : "Nothing contradicts what the rest implies.";
  const rest = audit.number > found.length && h("p", { class: "note" }, `the first ${number(found.length)} are shown`);
  const notes = audit.notes.length > 0 && h("ul", { class: "note" }, audit.notes.map((note) => h("li", {}, `not checked: ${note}`)));
  return card("Audit", h("strong", {}, verdict), h("p", { class: "note" }, `checked: ${checks}`), found.length > 0 && h("ul", {}, found), rest, notes);
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

// The list of reasons. When it is drawn again, what is open stays open.
class Reasons {
  constructor(place) {
    this.place = place;
    this.note = h("p", { class: "note" });
    this.list = h("div", { class: "reasons" });
    this.whole = card("Reasons", this.note, this.list);
    this.box = h("div", { class: "contents" });
    this.rows = new Map(); // by status and kind
  }

  draw({ kinds, num_kinds: all }) {
    this.note.textContent = all > kinds.length ? `the ${kinds.length} most frequent of ${number(all)} kinds` : "A click lists the rollouts of a reason.";
    const rows = new Map(kinds.map((row) => [JSON.stringify([row.status, row.kind]), kindRow(row, kinds[0].count_all, this.place)]));
    for (const [name, made] of rows) {
      const old = this.rows.get(name);
      if (!old) continue;
      renewRow(old, made);
      rows.set(name, old);
    }
    this.rows = rows;
    arrange(this.list, [...rows.values()]);
    arrange(this.box, [kinds.length ? this.whole : card("Reasons", empty("No reasons", "Every rollout was used."))]);
  }
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

const lists = new WeakMap(); // by the element of a reason: the class of its list, and what shows it

function opening(row, most, why, kind, show) {
  const details = h("details", { data: { count: row.count_all } },
    h("summary", {},
      statusChip(row.status), h("span", { class: "why" }, why),
      h("span", { class: "cost" }, h("b", {}, compact(row.response_tokens_sum ?? 0)), h("small", {}, " tokens")), h("span", { class: "cost" }, h("b", {}, seconds(row.seconds_sum ?? 0)), h("small", {}, " of episodes")),
      spark(row.steps), h("small", {}, row.step_min === row.step_max ? `step ${row.step_min}` : `steps ${row.step_min} – ${row.step_max}`),
      h("span", { class: "amount" }, h("i", { class: "bar", style: { width: `${(100 * row.count_all) / most}%`, background: STATUS[row.status] ?? "#888" } })), h("span", { class: "cost" }, h("b", { class: "times" }, number(row.count_all)), h("small", {}, row.count_all === 1 ? " rollout" : " rollouts"))),
    h("div"));
  lists.set(details, { kind, show });
  details.addEventListener("toggle", () => {
    details.querySelector(":scope > .again")?.remove();
    if (!details.open) return;
    const newest = lists.get(details);
    const list = h("div", { class: newest.kind }); // a new one: what an earlier list still waits for is not shown
    details.dataset.listed = details.dataset.count;
    details.lastElementChild.replaceWith(list);
    newest.show(list);
  });
  return details;
}

// Shows the newest numbers of a reason. Its list, if it is open, stays, with a button for what was recorded since.
function renewRow(details, made) {
  fill(details.querySelector("summary"), [...made.querySelector("summary").childNodes]);
  details.dataset.count = made.dataset.count;
  lists.set(details, lists.get(made));
  const added = details.dataset.count - details.dataset.listed;
  details.querySelector(":scope > .again")?.remove();
  if (!details.open || !(added > 0)) return;
  details.lastElementChild.before(h("button", { type: "button", class: "more again", on: { click: () => details.dispatchEvent(new Event("toggle")) } }, `${number(added)} more were recorded: list them`));
}

// How often in each step, as small bars. Beyond 80 steps a bar counts several.
function spark(steps) {
  const known = Object.entries(steps).map(([step, count]) => [Number(step), count]);
  const [first, last] = [known[0][0], known.at(-1)[0]];
  const bins = Math.min(SPARK, last - first + 1);
  const counts = Array(bins).fill(0);
  for (const [step, count] of known) counts[Math.floor(((step - first) * bins) / (last - first + 1))] += count;
  const most = Math.max(...counts);
  const width = SPARK / bins;
  const bar = (count, bin) => count > 0 && svg("rect", { x: bin * width, y: 18 - (16 * count) / most, width: Math.max(0.8, width - 0.5), height: (16 * count) / most });
  return svg("svg", { viewBox: `0 0 ${SPARK} 18`, class: "spark", "aria-hidden": "true" }, counts.map(bar));
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
