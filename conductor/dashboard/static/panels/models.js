// The models of a cluster with several: what each has idle while others lack nodes, and what was lent.
import { byId, cell, fill, format, row } from "../elements.js";

export function drawModels(models) {
  const several = models ?? [];
  byId("models").hidden = several.length === 0;
  fill(byId("models").querySelector("table"), several.map((one) => row(one.name, one.num_nodes, one.num_idle ?? "–", one.num_requests,
    cell(one.queues ? "yes" : "no"), cell(format.format(Math.round(one.stranded_node_s ?? 0)), "number"), cell(one.loan ?? "", "soft"))));
}
