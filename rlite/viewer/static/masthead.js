// The head of the overview: what a run is, how far it has come, and whether it goes on.

import { isExport } from "viewer/api";
import { ago, h, number, seconds } from "viewer/dom";

// The state of a run in a word, and in a sentence. A server knows whether a process on its machine has ended; of others,
// how long nothing has changed.
export function stateOf(run) {
  const { state, error, last_step: step, total_steps: total } = run;
  const isLive = !isExport() && Date.now() / 1000 - run.changed_at < run.live_s;
  const changed = run.changed_at ? `; its last change was ${ago(run.changed_at)}` : "";
  if (run.is_unfinished_evaluation) return { kind: isLive ? "live" : "unfinished", told: `not every model has answered${changed}` };
  if (run.is_evaluation) return { kind: "finished", told: "every model has answered" };
  if (state === "crashed") return { kind: "crashed", told: error ? `it ended with ${error}${changed}` : `its process has ended without a word: it was killed, or its machine failed${changed}` };
  if (state === "stopped") return { kind: "stopped", told: error ? `it was interrupted${changed}` : `it ended before its last step${changed}` };
  if (state === "finished" || (total && step >= total && !isLive)) return { kind: "finished", told: `it has made its last step${changed}` };
  if (isLive) return { kind: "live", told: `it is under way${changed}` };
  if (isExport()) return { kind: "unfinished", told: "it had not ended when this file was written" };
  return { kind: "silent", told: run.changed_at ? `no process on this machine says that it has ended${changed}` : "it has written nothing yet" };
}

// facts: {model, data, clock, color, heading}
export function masthead(run, { config, clock, color, several }) {
  const { kind, told } = stateOf(run);
  const { begun, last_step: step, total_steps: total } = run;
  const [model, data] = [modelOf(config), dataOf(config)];
  const spent = clock?.seconds.at(-1);
  const left = kind === "live" && total > step && clock?.pace ? (total - step) * clock.pace : null;
  const facts = [
    ["model", model],
    ["data", data],
    ["trainer", begun.trainer && `${begun.trainer}${begun.version ? `, rlite ${begun.version}` : ""}`],
    ["commit", begun.commit && h("code", {}, begun.commit)],
    ["began", begun.at && new Date(1000 * begun.at).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" })],
    ["duration", spent && `${seconds(spent)} in steps and evaluations`],
    ["remaining", left !== null && `about ${seconds(left)}, at ${seconds(clock.pace)} a step`],
  ].filter(([, value]) => value);
  const progress = step > 0 && total > 0 && h("progress", { max: total, value: Math.min(step, total), "aria-label": `${run.name}: steps` });
  const toldStep = step > 0 && h("span", { class: "step", data: { step } }, "step ", h("b", {}, number(step)), total ? ` of ${number(total)}` : "");
  return h("section", { class: "masthead", "aria-label": run.name },
    h("div", { class: "title" }, h("h1", {}, several && h("i", { class: "dot", style: { background: color } }), run.name), h("span", { class: `state ${kind}` }, kind), toldStep, progress, h("small", { class: kind }, told)),
    facts.length > 0 && h("dl", { class: "about" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { dir: "auto" }, value)))),
    begun.command && h("pre", { class: "command", tabindex: "0", role: "region", "aria-label": "command" }, begun.command));
}

// The first model that options name: that which is trained.
function modelOf(config) {
  const names = Object.keys(config).filter((name) => /(^|\.)model_name$/.test(name) && config[name]);
  return names.length ? String(config[names.find((name) => name.startsWith("actor.")) ?? names[0]]) : "";
}

function dataOf(config) {
  const names = Object.keys(config).filter((name) => /^(train_)?data\.(path|mixture\..*\.path)$/.test(name) && config[name]);
  return names.map((name) => String(config[name])).join(", ");
}
