// A snapshot of /v1/live with those before it: totals become rates per second.
import { seeNodes } from "./nodes.js";
import { seeRequests } from "./requests.js";

const HEARTBEATS_S = 5; // node figures arrive with heartbeats, about one per second: average over several

let past = []; // of the snapshots of the last seconds, oldest first, what rates need

const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);

// Outcomes of prefix lookups and why hits ended early; a tenant gets its own outcomes only.
export const prefixesOf = (now) => now.cluster?.prefixes ?? { outcomes: now.outcomes ?? {}, missed: {} };

function perSecond(now, before, value) {
  const span = before ? now.unix_s - before.unix_s : 0;
  return span > 0 ? Math.max(0, value(now) - value(before)) / span : 0;
}

// Each of ``totals`` with its rate since the snapshot ``before``; ``first(total)``: the former bytes of a new one.
function rated(now, before, totals, key, first) {
  const span = before ? now.unix_s - before.unix_s : 0;
  const known = new Map((before?.[totals] ?? []).map((one) => [key(one), one.nbytes]));
  return (now[totals] ?? []).map((one) => {
    const more = one.nbytes - (known.get(key(one)) ?? first(one));
    return { ...one, rate: span > 0 ? Math.max(0, more) / span : 0 };
  });
}

class Frame {
  constructor(now, before, oldest) {
    this.now = now;
    this.before = before;
    this.isWhole = now.tenant === undefined; // not one tenant's
    this.routes = rated(now, before, "routes", (route) => `${route.source}\n${route.target}`, () => 0);
    this.paths = rated(now, oldest, "paths", (path) => path.path, (path) => path.nbytes);
    this.nodes = this.isWhole ? seeNodes(now) : [];
    this.requests = seeRequests(now.requests);
  }

  // Rate of a request-level metric over the last second.
  rate(name) { return perSecond(this.now, this.before, (one) => one.metrics[name]); }

  // Rate of the sum of ``value(snapshot)``, counts by name.
  rateOf(value) { return perSecond(this.now, this.before, (one) => sum(value(one))); }
}

// The connection broke: the next one may lead to another conductor, which has other totals.
export function forget() { past = []; }

export function arrived(now) {
  // The last one in any case: those of large clusters come less often.
  const last = past.at(-1);
  past = past.filter((one) => (one === last || now.unix_s - one.unix_s <= HEARTBEATS_S) && one.unix_s <= now.unix_s);
  const frame = new Frame(now, past.at(-1), past[0]);
  const { unix_s, metrics, routes, paths, rejections, tokens, outcomes } = now;
  past.push({ unix_s, metrics, routes, paths, rejections, tokens, outcomes, cluster: now.cluster && { prefixes: now.cluster.prefixes } });
  return frame;
}
