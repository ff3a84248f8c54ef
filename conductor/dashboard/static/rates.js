// Rates per second: differences of totals between snapshots.

const HEARTBEATS_S = 5; // node figures arrive with heartbeats, about one per second: average over several

let past = []; // snapshots of the last seconds, oldest first

export function remember(now) {
  past = past.filter((one) => now.unix_s - one.unix_s <= HEARTBEATS_S);
  past.push({ unix_s: now.unix_s, metrics: now.metrics, routes: now.routes, paths: now.paths, rejections: now.rejections, tokens: now.tokens });
}

const sum = (counts) => Object.values(counts).reduce((all, count) => all + count, 0);

function perSecond(now, before, value) {
  const span = before ? now.unix_s - before.unix_s : 0;
  return span > 0 ? Math.max(0, value(now) - value(before)) / span : 0;
}

// Rate of a request-level metric over the last second.
export const rate = (now, name) => perSecond(now, past.at(-1), (one) => one.metrics[name]);
export const rateOfAll = (now, value) => perSecond(now, past.at(-1), (one) => sum(value(one)));

// Each of ``totals`` with its rate since the snapshot ``before``; ``first(total)``: the former bytes of a new one.
function rated(now, before, totals, key, first) {
  const span = before ? now.unix_s - before.unix_s : 0;
  const known = new Map((before?.[totals] ?? []).map((one) => [key(one), one.nbytes]));
  return now[totals].map((one) => {
    const more = one.nbytes - (known.get(key(one)) ?? first(one));
    return { ...one, rate: span > 0 ? Math.max(0, more) / span : 0 };
  });
}

export const withRates = (now) => rated(now, past.at(-1), "routes", (route) => `${route.source}\n${route.target}`, () => 0);
export const pathsWithRates = (now) => rated(now, past[0], "paths", (path) => path.path, (path) => path.nbytes);
