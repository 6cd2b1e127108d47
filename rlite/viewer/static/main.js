// The frame of the pages: navigation, keys, light and dark, and news of a run that goes on.

import * as api from "viewer/api";
import { colorOfRun, isDark } from "viewer/colors";
import { discard, empty, fill, h, update } from "viewer/dom";
import { stateOf } from "viewer/masthead";
import * as compare from "viewer/compare";
import * as ledger from "viewer/ledger";
import * as overview from "viewer/overview";
import * as rollouts from "viewer/rollouts";
import * as sample from "viewer/sample";
import * as timeline from "viewer/timeline";
import * as tinker from "viewer/tinker";

// The pages, in the order of their keys. A page is a line here and a module NAME.js in this folder with
//
//   render(parameters, app, signal) -> { body, keys, renew, hearTrace, tick, shown }
//
// `parameters` are those of the address `#/NAME?...`, `app` is below, and `signal` aborts when the reader leaves. Of the
// answer only `body`, an element, is needed: `keys` are functions by key, `renew` is called when a run has changed,
// `hearTrace` when a trace has, `tick` every few seconds, and `shown` when the page is in the document. What a page asks
// of the server by `ask(NAME)` is a function of `_ANSWERS` in answers.py. A page with `isShown(runs)` is in the navigation
// only if that is true.
const PAGES = {
  overview: { title: "Overview", render: overview.render },
  rollouts: { title: "Rollouts", render: rollouts.render },
  sample: { title: "Sample", render: sample.render },
  compare: { title: "Compare", render: compare.render },
  timeline: { title: "Timeline", render: timeline.render },
  ledger: { title: "Ledger", render: ledger.render },
  tinker: { title: "Tinker", render: tinker.render, isShown: (runs) => runs.some((run) => run.is_tinker) },
};
const LOOK_EVERY_MS = 5000; // at the clock
const KEYS = [
  ["1 – 9", "pages"],
  ["← →", "sample: previous, next of the group; timeline: move"],
  ["↑ ↓", "sample: previous, next group"],
  ["[ ]", "previous, next step"],
  ["arrows, Enter", "rollouts: move in the grid, open"],
  ["c t s", "sample: conversation, tokens, side by side"],
  ["← → in tokens", "sample: previous, next token with its values"],
  ["+ − 0", "timeline: zoom in, out, all"],
  ["/", "search"],
  ["d", "light or dark"],
  ["?", "these keys"],
];

// what pages may use of the frame
const app = {
  runs: [],
  // goes to a page; parameters that are empty are left out
  go(page, parameters = {}, { replace = false } = {}) {
    const address = app.link(page, parameters);
    if (replace) {
      history.replaceState(null, "", address);
      show();
    } else location.hash = address;
  },
  link(page, parameters = {}) {
    const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    return `#/${page}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  },
  // writes into the address what the page has drawn already
  keep(page, parameters) {
    history.replaceState(null, "", app.link(page, parameters));
    document.getElementById("main").dataset.shown = location.hash;
  },
  again: () => show(), // draws the page anew
};
let current = { page: "", keys: {}, renew: null, hearTrace: null, tick: null };
let numTraces = 0; // news of traces
let turn = 0;
let stay = new AbortController(); // it ends when the reader goes to another place

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const page = path in PAGES ? path : "overview";
  return { page, parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

async function show() {
  const mine = ++turn;
  stay.abort();
  stay = new AbortController();
  const { page, parameters } = place();
  const { runs } = app;
  const traces = numTraces;
  const main = document.getElementById("main");
  const isNew = page !== current.page;
  if (isNew) main.dataset.page = page;
  main.setAttribute("aria-busy", "true");
  document.title = `${PAGES[page].title} · rlite view`;
  showFrame(page);
  try {
    const made = await PAGES[page].render(parameters, app, stay.signal);
    if (mine !== turn) {
      discard(made.body); // the reader has moved on
      return;
    }
    fill(main, made.body);
    current = { page, keys: made.keys ?? {}, renew: made.renew ?? null, hearTrace: made.hearTrace ?? null, tick: made.tick ?? null };
    made.shown?.();
    if (runs !== app.runs) current.renew?.(); // there was news meanwhile
    if (traces !== numTraces) current.hearTrace?.();
  } catch (error) {
    if (mine !== turn) return;
    fill(main, empty("This cannot be shown", error.message));
    current = { page, keys: {}, renew: show, hearTrace: null, tick: null };
  }
  main.removeAttribute("aria-busy");
  main.dataset.shown = location.hash;
  if (isNew) scrollTo(0, 0);
}

function showFrame(page) {
  const links = shownPages().map((name, index) =>
    h("a", { href: linkTo(name), title: `key ${index + 1}`, "aria-current": name === page ? "page" : null }, PAGES[name].title));
  update(document.getElementById("nav"), links);
  showRuns();
}

function shownPages() {
  return Object.keys(PAGES).filter((name) => PAGES[name].isShown?.(app.runs) ?? true);
}

function showRuns() {
  const chips = app.runs.map((run, index) =>
    h("span", { class: "run", title: run.folder },
      h("i", { class: "dot", style: { background: colorOfRun(index) } }),
      h("span", {}, run.name),
      h("small", { class: stateOf(run).kind }, stateOf(run).kind)));
  update(document.getElementById("runs"), chips);
}

// pages that show one step keep it when the reader goes from one to another
function linkTo(page) {
  const { run, source, step } = place().parameters;
  return page === "overview" ? app.link(page) : app.link(page, { run, source, step });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key.startsWith("Arrow") && event.target.closest(".scroll")) return; // it scrolls
  const number = Number(event.key);
  const act = current.keys[event.key] ?? frameKeys[event.key];
  if (number >= 1 && shownPages()[number - 1]) location.hash = linkTo(shownPages()[number - 1]);
  else if (!act || act(event) === false) return;
  event.preventDefault();
}

const frameKeys = {
  d: switchTheme,
  "?": showKeys,
  "/": () => document.querySelector("main input[type=search]")?.focus(),
};

function showKeys() {
  const dialog = document.getElementById("keys");
  const rows = KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)]);
  fill(dialog, h("h2", {}, "Keys"), h("dl", {}, rows), h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.showModal();
}

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  remember("theme", document.documentElement.dataset.theme);
  show();
}

// a file from disk may have no storage
function remember(name, value) {
  try {
    localStorage.setItem(`rlite-${name}`, value);
  } catch {
    return;
  }
}

function remembered(name) {
  try {
    return localStorage.getItem(`rlite-${name}`);
  } catch {
    return null;
  }
}

async function hearNews() {
  app.runs = await api.ask("runs");
  showFrame(place().page);
  await current.renew?.();
}

// Only the timeline shows traces.
async function hearTrace() {
  numTraces += 1;
  if (!current.hearTrace) return;
  app.runs = await api.ask("runs");
  await current.hearTrace?.();
}

// Says why the page does not hear of changes; an empty text takes it back.
function tellConnection(text) {
  update(document.getElementById("connection"), text);
}

async function begin() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chooseTheme = () => (document.documentElement.dataset.theme = remembered("theme") ?? (dark.matches ? "dark" : "light"));
  chooseTheme();
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  try {
    await api.start();
    app.runs = await api.ask("runs");
  } catch (error) {
    fill(document.getElementById("main"), empty("The run cannot be read", error.message));
    return;
  }
  addEventListener("hashchange", show);
  addEventListener("keydown", onKey);
  dark.addEventListener("change", () => {
    chooseTheme();
    show();
  });
  await show();
  setInterval(() => {
    showRuns();
    current.tick?.();
  }, LOOK_EVERY_MS);
  api.follow({ act: () => hearNews().catch(() => {}), actOnTrace: () => hearTrace().catch(() => {}), tell: tellConnection });
}

begin();
