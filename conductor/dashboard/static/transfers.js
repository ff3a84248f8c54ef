// Transfers: per path over all nodes, and per pair of nodes.
import { byId, bytes, cell, fill, row, seconds } from "./elements.js";

const number = (text) => cell(text, "number");
const whileMoving = (one) => number(one.seconds ? `${bytes(one.nbytes / one.seconds)}/s` : "–");

function count(value) { return cell(value.toLocaleString("en"), value ? "number bad" : "number"); }

export function drawTransfers(paths, routes) {
  fill(byId("paths"), paths.map((path) => row(path.path, number(`${bytes(path.rate)}/s`), whileMoving(path),
    number(bytes(path.nbytes)), path.batches, number(seconds(path.p50_s)), number(seconds(path.p99_s)),
    path.in_flight, count(path.failures), count(path.retries))));
  const sorted = [...routes].sort((a, b) => b.rate - a.rate || b.nbytes - a.nbytes);
  fill(byId("routes"), sorted.map((route) => row(route.source, route.target, route.transport || "–",
    number(`${bytes(route.rate)}/s`), whileMoving(route), number(bytes(route.nbytes)), route.transfers,
    number(seconds(route.transfers ? route.seconds / route.transfers : 0)), count(route.failures))));
}
