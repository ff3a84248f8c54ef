// What the cache's counts are called, and sums of them.
import { format } from "./elements.js";

export const SOURCES = { computed: "computed", pool: "its own pool", host: "host memory", ssd: "disk", fetched: "another node" };
// Outcomes of prefix lookups; docs/troubleshooting.md explains each.
export const OUTCOMES = {
  hit: "hit", off: "cache not asked", short: "no whole block", unused: "cached, not used", pending: "just computed", dropped: "evicted",
  layout: "other layout", salted: "other salt", headed: "other head", new: "never seen",
};
// Of a hit: why it did not reach further.
const MISSED = {
  unused: "rest cached, not used", pending: "rest just computed", dropped: "rest evicted", layout: "rest in other layout",
  salted: "rest of other salt", new: "rest never seen",
};
export const LOCAL = ["pool", "host", "ssd"];

function title(outcome, missed) {
  const name = OUTCOMES[outcome] ?? outcome;
  return missed ? `${name}, ${MISSED[missed] ?? missed}` : name;
}

export const wholeHits = ({ outcomes = {}, missed = {} }) =>
  (outcomes.hit ?? 0) - Object.values(missed).reduce((all, count) => all + count, 0);

// [title, count] of each outcome, most first. Hits that ended early are outcomes of their own.
export function outcomePairs(prefixes) {
  const { outcomes = {}, missed = {} } = prefixes;
  const whole = Object.entries({ ...outcomes, hit: wholeHits(prefixes) }).map(([name, count]) => [title(name), count]);
  const early = Object.entries(missed).map(([name, count]) => [title("hit", name), count]);
  return [...whole, ...early].filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
}

export function outcomeOf(request) {
  const places = Object.entries(request.cached_from ?? {}).map(([name, count]) => `${format.format(count)} from ${SOURCES[name] ?? name}`);
  return [title(request.prefix_outcome, request.prefix_missed), ...places].filter(Boolean).join(", ");
}

export function parts(tokens) {
  const local = LOCAL.reduce((all, name) => all + (tokens[name] ?? 0), 0), remote = tokens.fetched ?? 0;
  return { local, remote, all: local + remote + (tokens.computed ?? 0) };
}
