// What pages of one source share: the choice of run, source and step, and what they say without rollouts.

import { STATUS } from "viewer/colors";
import { empty, h, select, words } from "viewer/dom";

// What a page says in place of rollouts.
export function noRecord(about) {
  return empty("No rollouts are recorded", ...withoutRecord([about]));
}

// Why some runs have no record.
export function withoutRecord(runs) {
  const names = runs.map((run) => run.name).join(", ");
  return runs.some((run) => run.records)
    ? [`${names}: there are no files in record/. A run records rollouts, and sft the answers to its test sets with a reward, with trainer.record=sample (texts of some) or all. The first step or evaluation writes the first file.`]
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
