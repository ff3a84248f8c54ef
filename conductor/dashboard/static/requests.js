// The latest requests: those of the snapshots and those that the page asks for.
import { json } from "./elements.js";

const KEPT = 512; // as many as a conductor remembers
const ASKED_EVERY_MS = 5000;

let known = new Map();
let askedMs = -Infinity;

// Take over records; returns all that are known, newest first.
export function seeRequests(records) {
  for (const one of records) known.set(one.id, one);
  const latest = [...known.values()].sort((one, other) => other.received_unix_s - one.received_unix_s).slice(0, KEPT);
  known = new Map(latest.map((one) => [one.id, one]));
  return latest;
}

// Ask for more than the snapshots have: all that the conductor remembers. What it has forgotten is no longer running.
export async function askForRequests() {
  askedMs = performance.now();
  let data;
  try {
    ({ data } = await json(`/v1/requests?limit=${KEPT}`));
  } catch { return; /* the snapshots have the latest */ }
  const listed = new Set(data.map((one) => one.id)), newest_s = data[0]?.received_unix_s ?? Infinity;
  for (const one of known.values()) {
    if (one.status === "running" && one.received_unix_s <= newest_s && !listed.has(one.id)) known.delete(one.id);
  }
  seeRequests(data);
}

// A snapshot does not tell the end of a request that many newer ones follow: ask, but not too often.
export function followRunning(requests, told) {
  const ids = new Set(told.map((one) => one.id));
  if (performance.now() - askedMs < ASKED_EVERY_MS) return;
  if (requests.some((one) => one.status === "running" && !ids.has(one.id))) askForRequests();
}
