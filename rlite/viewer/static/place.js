// What pages of one source share: the choice of run, source and step, and what they say without rollouts.

import { STATUS } from "viewer/colors";
import { empty, h, select, update, words } from "viewer/dom";

export const TARGET = /target|answer|solution|label|truth|expected/i; // columns of the data that are read before the others

// The run and the source that an address names, or a page that says why there is none. Such a page is drawn again when
// the run records more.
export function placeOf(parameters, app, page) {
  const run = Number(parameters.run ?? 0);
  const about = app.runs[run];
  if (!about) return { missing: { body: empty("No such run", app.runs.length === 1 ? "There is 1 run." : `There are ${app.runs.length} runs.`) } };
  const sources = Object.keys(about.sources);
  const source = parameters.source || sources[0];
  if (sources.includes(source)) return { run, about, source, sources };
  const told = sources.length ? noSource(source, { run, sources, page, app, about }) : empty("No rollouts are recorded", ...withoutRecord([about]));
  const renew = () => String(Object.keys(app.runs[run].sources)) !== String(sources) && app.again();
  return { missing: { body: h("div", { class: "page" }, told), renew } };
}

function noSource(source, { run, sources, page, app, about }) {
  const links = sources.flatMap((name, index) => [index > 0 && ", ", h("a", { href: app.link(page, { run, source: name }) }, sourceName(name))]);
  return empty("No such source", `${about.name} has no rollouts of ${source}. It has: `, links);
}

// What was recorded since a page was drawn, with links to it: a later step of its source, more rollouts of its steps, and
// other sources.
export class News {
  constructor(page, { app, run, source, about, parameters = {} }) {
    Object.assign(this, { page, app, run, source, parameters, before: about.sources });
    // a link to the place that is shown draws it again
    const again = (event) => {
      if (!event.target.closest("[data-again]")) return;
      event.preventDefault();
      app.again();
    };
    this.box = h("span", { class: "news", role: "status", on: { click: again } });
  }

  tell() {
    const now = this.app.runs[this.run].sources;
    const others = Object.keys(now).filter((name) => !this.before[name]).map((name) => this.link({ source: name, step: "" }, `Rollouts of ${sourceName(name)} have been recorded`));
    const links = [this.page !== "ledger" && now[this.source] && this.ofSource(now[this.source], this.before[this.source]), ...others].filter(Boolean);
    update(this.box, links.flatMap((each, index) => (index ? [" · ", each] : [each])));
  }

  // The ledger shows all steps, and draws them again by itself.
  ofSource({ steps, rollouts }, before) {
    const newest = steps.at(-1);
    if (newest !== before.steps.at(-1)) return this.link({ source: this.source, step: newest }, `Step ${newest} has been recorded`);
    return rollouts !== before.rollouts && h("a", { href: location.hash, "data-again": true }, "More rollouts are recorded: show them");
  }

  link(changes, text) {
    return h("a", { href: this.app.link(this.page, { ...this.parameters, run: this.run, ...changes }) }, text);
  }
}

// Why some runs have no record.
export function withoutRecord(runs) {
  const names = runs.map((run) => run.name).join(", ");
  if (runs.every((run) => run.is_unfinished_evaluation)) return [`${names}: rlite eval records answers when it has judged the first ones.`];
  return runs.some((run) => run.records)
    ? [`${names}: there are no files in record/. ${runs.every((run) => run.begun.trainer === "sft") ? "SFT makes no rollouts. It records the answers to test sets that have a reward" : "The first step or evaluation writes the first file"}, with trainer.record=sample (texts of some) or all.`]
    : [`${names}: only reinforcement learning, rlite eval, and sft with test sets that have a reward record samples. The overview shows the metrics of this run.`];
}

// The name of training, of a test set, or of a model in an evaluation.
export function sourceName(source) {
  return source === "train" ? "training" : source.replace(/^eval\./, "");
}

// Choices of step, source and run, which several pages have.
export function placeBar(page, { app, run, source, step, steps, parameters }) {
  const go = (changes) => app.go(page, { ...parameters, ...changes }, { replace: true });
  const at = steps.indexOf(step);
  const arrow = (by, text, title) => h("button", { type: "button", title, "aria-label": title, disabled: steps[at + by] === undefined, on: { click: () => go({ step: steps[at + by] }) } }, text);
  const sources = Object.keys(app.runs[run].sources);
  return [
    app.runs.length > 1 && select("run", app.runs.map((each, index) => [index, each.name]), run, (value) => go({ run: value, source: "", step: "" })),
    sources.length > 1 && select("source", sources.map((name) => [name, sourceName(name)]), source, (value) => go({ source: value, step: "" })),
    (steps.length > 1 || step > 0) && h("span", { class: "stepper" }, arrow(-1, "‹", "previous step ([)"), select("step", steps.map((each) => [each, each]), step, (value) => go({ step: value })), arrow(1, "›", "next step (])"), h("small", {}, `of ${steps.at(-1)}`)),
  ];
}

export function statusChip(status) {
  return h("span", { class: "status" }, h("i", { class: "dot", style: { background: STATUS[status] ?? "#888" } }), words(status));
}
