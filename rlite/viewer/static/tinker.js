// Tinker: models of a server of the Tinker API, with their tenants, queues and losses.

import { ask } from "viewer/api";
import { lineChart, renewCharts } from "viewer/charts";
import { card, empty, h, number, scroller, update } from "viewer/dom";

const CHARTS = [
  ["Loss", "loss_per_token", "per token, of the last request of each step"],
  ["Gradient norm", "grad_norm", ""],
];
const MOST_LINES = 8; // models in a chart, those that were used last

export async function render(parameters, app) {
  const [facts, charts] = [h("div", { class: "contents" }), h("div", { class: "charts" })];
  const draw = async () => {
    const found = await Promise.all(app.runs.map((run, index) => (run.is_tinker ? ask("tinker", { run: index }) : null)));
    const servers = found.filter(Boolean);
    update(facts, servers.length ? servers.map(about) : empty("No server of the Tinker API", "rlite tinker writes tinker.json into its folder. Open that folder: rlite view runs/tinker"));
    const models = servers.flatMap((server) => server.models).filter((model) => model.points.length);
    renewCharts(charts, CHARTS.map(([title, name, note]) => chart(title, name, note, models)).filter(Boolean));
  };
  await draw();
  return { body: h("div", { class: "page" }, facts, charts), renew: () => draw().catch(() => {}) };
}

function about({ base, samples, num_models: total, models }) {
  const tenants = new Set(models.map(({ tenant }) => tenant)).size;
  const waiting = models.reduce((sum, model) => sum + model.waiting, 0);
  const title = `${base}: ${number(tenants)} tenants, ${number(waiting)} requests wait, ${number(samples)} samples under way`;
  const note = total > models.length && h("p", { class: "note" }, `the ${models.length} of ${number(total)} models that were used last`);
  const heads = ["tenant", "model", "rank", "state", "waiting", "steps", "loss per token", ""].map((name) => h("th", {}, name));
  const rows = models.map((model) => h("tr", {}, [
    model.tenant, model.model, number(model.rank), model.state, number(model.waiting), number(model.steps),
    number(model.points.at(-1)?.loss_per_token ?? null), model.problem ?? "",
  ].map((cell) => h("td", {}, cell))));
  return card(title, note, scroller("models", { class: "scroll whole" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows))));
}

function chart(title, name, note, models) {
  const lines = models.slice(0, MOST_LINES).map((model) => ({
    label: `${model.tenant} ${model.model}`,
    steps: model.points.map(({ step }) => step),
    values: model.points.map((point) => point[name] ?? null),
  }));
  return lineChart(title, lines, { note });
}
