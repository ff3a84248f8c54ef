// The latest requests: those of the snapshots and those that the page asked for at its start.

const KEPT = 512;

let known = new Map();

// Take over records; returns all that are known, newest first.
export function seeRequests(records) {
  for (const one of records) known.set(one.id, one);
  const latest = [...known.values()].sort((one, other) => other.received_unix_s - one.received_unix_s).slice(0, KEPT);
  known = new Map(latest.map((one) => [one.id, one]));
  return latest;
}
