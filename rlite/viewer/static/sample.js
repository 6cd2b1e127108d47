// One rollout: its conversation, its tokens, its siblings, and where its time went.

import { ask, isExport } from "viewer/api";
import { colorOfWork, range, scale } from "viewer/colors";
import { card, empty, h, key, longText, newest, number, rowsOf, seconds, svg, words } from "viewer/dom";
import { News, placeOf, sourceName, statusChip, TARGET } from "viewer/place";
import { tokenView } from "viewer/tokens";

const TABS = { conversation: "Conversation", tokens: "Tokens", siblings: "Side by side" };
const ROLES = { prompt: "Prompt", model: "Model", environment: "Environment" };
const MAX_JUDGED = 80; // letters beside the reward
const MAX_EVENTS = 256; // stages of an episode that are recorded
const COLUMNS = ["group", "sample", "status", "reward"]; // of the other rollouts of the step
// Calls of tools in the formats that have marks: Hermes and XML, Mistral, Llama 3. The mark that ends a call may be
// missing in the model's own text. Calls in JSON or Python without a mark look like any other text.
const CLOSED_CALL = /(<tool_call>(?:(?!<tool_call>)[\s\S])*?<\/tool_call>)/; // linear: none searches beyond the next mark
const MODEL_CALL = /(<tool_call>[\s\S]*?(?:<\/tool_call>|$)|(?:\[TOOL_CALLS\]|<\|python_tag\|>)[\s\S]*?(?=<\/s>|<\|e(?:om|ot)_id\|>|$))/;
const FACTS = ["item", "answer", "score", "advantage", "turns", "tool_calls", "tool_errors", "prompt_tokens", "response_tokens", "truncated"];

export async function render(parameters, app) {
  const { missing, run, about, source } = placeOf(parameters, app, "sample");
  if (missing) return missing;
  const steps = about.sources[source].steps;
  const step = parameters.step === undefined ? newest(steps, about) : Number(parameters.step);
  const { group, sample } = parameters;
  if (group !== undefined && sample !== undefined) ask("sample", { run, source, step, group, sample }).catch(() => {}); // at once with the rows
  const rows = rowsOf((await ask("rows", { run, source, step, ...(isExport() ? {} : { columns: COLUMNS }) })).columns);
  if (!rows.length) {
    const renew = () => app.runs[run].sources[source]?.rollouts !== about.sources[source].rollouts && app.again();
    return { body: empty(`Step ${step} has no rollouts`, `${source} has the steps ${steps[0]} to ${steps.at(-1)}.`), renew };
  }
  const isChosen = (row) => row.group === Number(group) && row.sample === Number(sample);
  const row = rows.find(isChosen) ?? rows.find((each) => each.status === "trained" || each.status === "evaluated") ?? rows[0];
  const place = { run, source, step, group: row.group, sample: row.sample };
  const found = await ask("sample", place);
  const tab = parameters.tab in TABS ? parameters.tab : "conversation";
  const news = new News("sample", { app, run, source, about, parameters: { tab: parameters.tab, by: parameters.by } });
  const missed = group !== undefined && !isChosen(row) && h("p", { class: "note", role: "status" }, `Step ${step} has no sample ${sample ?? ""} of group ${group}. This is another one.`);
  const state = { app, about, news, place, rows, row: found.row, sequences: found.sequences, steps, tab, by: parameters.by };
  const content = await { conversation, tokens, siblings }[tab](state);
  const body = h("div", { class: "page" }, head(state), missed, h("div", { class: "columns sample" }, h("div", { class: "wide" }, tabs(state), content), h("div", { class: "side" }, facts(state), dataRow(state), family(state), parts(state), episode(state))));
  return { body, keys: keysOf(state), renew: () => news.tell() };
}

function keysOf(state) {
  const { app, rows, place, steps, tab, by } = state;
  const to = (next) => (next ? void app.go("sample", { ...place, ...next, tab, by }, { replace: true }) : false);
  const member = (offset) => () => to(neighbours(rows, place)[offset < 0 ? 0 : 1]);
  const group = (offset) => () => to(groupBeside(rows, place.group, offset));
  const step = (offset) => () => {
    const next = steps[steps.indexOf(place.step) + offset];
    return next === undefined ? false : void app.go("sample", { run: place.run, source: place.source, step: next, tab, by }, { replace: true });
  };
  const show = (name) => () => app.go("sample", { ...place, tab: name, by }, { replace: true });
  return {
    ArrowLeft: member(-1), ArrowRight: member(1), ArrowUp: group(-1), ArrowDown: group(1), "[": step(-1), "]": step(1),
    c: show("conversation"), t: show("tokens"), s: show("siblings"),
  };
}

function neighbours(rows, { group, sample }) {
  const at = rows.findIndex((row) => row.group === group && row.sample === sample);
  return [rows[at - 1], rows[at + 1]].map((row) => row && { group: row.group, sample: row.sample });
}

function groupBeside(rows, group, offset) {
  const groups = [...new Set(rows.map((row) => row.group))];
  const next = groups[groups.indexOf(group) + offset];
  return next === undefined ? null : { group: next, sample: rows.find((row) => row.group === next).sample };
}

function head({ app, about, news, place, rows, row, tab, by }) {
  const [before, after] = neighbours(rows, place);
  const arrow = (to, text, title) => h("a", { class: "button", role: to ? null : "link", "aria-label": title, title, "aria-disabled": to ? null : "true", href: to ? app.link("sample", { ...place, ...to, tab, by }) : null }, text);
  const judged = [[words("answer"), row.answer], ...Object.entries(row.data).filter(([name]) => TARGET.test(name)).slice(0, 1)].filter(([, value]) => value !== null && value !== undefined);
  const crumbs = [
    h("a", { href: app.link("overview") }, about.name),
    h("a", { href: app.link("rollouts", { run: place.run, source: place.source, step: place.step }) }, `${sourceName(place.source)}${place.step || about.last_step ? ` · step ${place.step}` : ""}`),
    h("a", { href: app.link("compare", { set: about.sources[place.source].set, item: row.item }) , title: "this prompt over steps and runs" }, `group ${place.group} · item ${row.item}`),
    h("span", {}, `sample ${place.sample}`),
  ];
  return h("div", { class: "samplehead" },
    h("nav", { class: "crumbs", "aria-label": "Place" }, crumbs),
    h("div", { class: "headline" },
      arrow(before, "‹", "previous rollout (←)"), arrow(after, "›", "next rollout (→)"),
      h("h1", { class: "big" }, number(row.reward), " ", h("small", {}, "reward")),
      judged.map(([name, value]) => h("span", { class: "judged", dir: "auto" }, h("small", {}, name), String(value).slice(0, MAX_JUDGED))),
      statusChip(row.status), row.reason && h("span", { class: "reason" }, row.reason), news.box));
}

function tabs({ app, place, tab, by }) {
  return h("nav", { class: "tabs", "aria-label": "Views of the rollout" }, Object.entries(TABS).map(([name, title]) =>
    h("a", { "aria-current": name === tab ? "page" : null, href: app.link("sample", { ...place, tab: name, by }) }, title)));
}

function conversation({ row }) {
  if (!row.segments?.length) return row.segments ? ended() : notRecorded("The text");
  return h("div", { class: "conversation" }, turnsOf(row.segments));
}

function notRecorded(what) {
  return empty(`${what} of this rollout is not recorded`, "trainer.record=sample records texts and tokens of some groups, all those of every group; trainer.record_limit bounds both.");
}

function ended() {
  return empty("No text", "This episode ended before its first request to the model.");
}

function turnsOf(segments) {
  let turn = 0;
  return segments.map(({ role, text }) => {
    const title = role === "model" ? `${ROLES.model} · turn ${(turn += 1)}` : ROLES[role] ?? role;
    return h("section", { class: `turn ${role}`, dir: "auto" }, h("h3", {}, title, h("small", {}, `${number(text.length)} characters`)), h("div", { class: "text" }, pieces(text.replace(/^\n/, ""), role === "model" ? MODEL_CALL : CLOSED_CALL)));
  });
}

// Calls of tools stand out.
function pieces(text, call) {
  return text.split(call).map((part, index) => part && (index % 2 ? h("code", { class: "call" }, longText(part)) : longText(part)));
}

function tokens(state) {
  if (!state.sequences.length) return state.row.segments && !state.row.segments.length ? ended() : notRecorded("The token column");
  const choose = (by) => state.app.go("sample", { ...state.place, tab: "tokens", by }, { replace: true });
  return tokenView(state.sequences, state.by, choose);
}

async function siblings({ app, place, rows }) {
  const own = rows.filter((row) => row.group === place.group);
  const all = await ask("group", { run: place.run, source: place.source, step: place.step, group: place.group }).catch(() => carried(own, place));
  const texts = new Map((await all).map((each) => [each.sample, each.segments]));
  const limits = range(rows.map((row) => row.reward));
  return h("div", { class: "beside" }, own.map((row) => {
    const segments = texts.get(row.sample);
    const answers = segments && turnsOf(segments.filter((segment) => segment.role !== "prompt"));
    return h("section", { class: row.sample === place.sample ? "current" : "" },
      h("h3", {}, h("i", { class: "swatch", style: { background: scale(row.reward, ...limits) } }),
        h("a", { href: app.link("sample", { ...place, sample: row.sample }) }, `sample ${row.sample}`), h("small", {}, `reward ${number(row.reward)}`)),
      answers ?? h("p", { class: "note" }, "not recorded"));
  }));
}

// An exported file has the samples one by one.
function carried(rows, place) {
  return Promise.all(rows.map((row) => ask("sample", { ...place, sample: row.sample }).then((found) => found.row, () => ({ sample: row.sample, segments: null }))));
}

function facts({ row, place }) {
  const versions = row.version_min === row.version_max ? number(row.version_min) : `${number(row.version_min)} – ${number(row.version_max)}`;
  const rows = FACTS.filter((name) => row[name] !== null && row[name] !== undefined).map((name) => [words(name), typeof row[name] === "boolean" ? (row[name] ? "yes" : "no") : number(row[name])]);
  rows.push(["policy version", versions]);
  if (row.ended) rows.push(["ended", new Date(1000 * row.ended).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })]);
  return card("Facts", h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

// Columns of the data, such as the true answer; they are recorded together with the text.
function dataRow({ row }) {
  const columns = Object.entries(row.data);
  if (!columns.length) return null;
  return card("Data row", h("dl", { class: "facts" }, columns.map(([name, value]) => [h("dt", {}, name), h("dd", { dir: "auto" }, longText(value, 300))])));
}

function family({ app, place, rows, tab, by }) {
  const own = rows.filter((row) => row.group === place.group);
  const limits = range(rows.map((row) => row.reward));
  const cells = own.map((row) => h("a", {
    class: `sibling${row.sample === place.sample ? " current" : ""}`, href: app.link("sample", { ...place, sample: row.sample, tab, by }),
    title: words(row.status), "aria-current": row.sample === place.sample ? "true" : null,
  }, h("i", { class: "swatch", style: { background: scale(row.reward, ...limits) } }), h("span", {}, row.sample), h("b", {}, number(row.reward, 3))));
  return card("Group", h("div", { class: "siblings" }, cells));
}

function parts({ row }) {
  const all = Object.entries(row.reward_parts);
  if (!all.length) return null;
  const most = Math.max(...all.map(([, value]) => Math.abs(value ?? 0)), 1e-9);
  return card("Parts of the reward", h("dl", { class: "bars" }, all.map(([name, value]) => [
    h("dt", {}, name), h("dd", {}, h("i", { class: value < 0 ? "bar negative" : "bar", style: { width: `${(100 * Math.abs(value ?? 0)) / most}%` } }), h("span", {}, number(value)))])));
}

// What is neither the engine nor the reward is the environment's time, if there is one.
function hasEnvironment(row) {
  return row.turns > 1 || row.tool_calls > 0 || (row.segments ?? []).some((segment) => segment.role === "environment");
}

function episode({ row }) {
  const events = row.events ?? [];
  if (!events.length) return null;
  const end = Math.max(...events.map((event) => event.end), 1e-9);
  const names = [...new Set(events.map((event) => event.name))];
  const title = (name) => (name === "environment" && !hasEnvironment(row) ? "other" : name);
  const bars = events.map((event) => svg("rect", { x: (300 * event.start) / end, y: 4 + 20 * names.indexOf(event.name), width: Math.max(1, (300 * (event.end - event.start)) / end), height: 14, rx: 2, fill: colorOfWork(event.name) },
    svg("title", {}, `${title(event.name)}: ${seconds(event.end - event.start)}, from ${seconds(event.start)}`)));
  const legend = names.map((name) => key(colorOfWork(name), `${title(name)} ${seconds(row[`seconds_${name}`])}`));
  const cut = events.length === MAX_EVENTS && h("p", { class: "note" }, `The picture shows the first ${MAX_EVENTS} stages; the seconds count all.`);
  return card("Episode", svg("svg", { viewBox: `0 0 300 ${4 + 20 * names.length}`, class: "episode", role: "img", "aria-label": "timeline of the episode" }, bars), h("p", { class: "legend" }, legend, !cut && h("span", {}, `in all ${seconds(end)}`)), cut);
}
