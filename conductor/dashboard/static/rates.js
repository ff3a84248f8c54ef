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

export function withRates(now) {
  const before = past.at(-1), key = (route) => `${route.source}\n${route.target}`;
  const span = before ? now.unix_s - before.unix_s : 0;
  const known = new Map((before?.routes ?? []).map((route) => [key(route), route.nbytes]));
  return now.routes.map((route) => {
    const nbytes = known.get(key(route)) ?? (before ? 0 : route.nbytes);
    return { ...route, rate: span > 0 ? Math.max(0, route.nbytes - nbytes) / span : 0 };
  });
}

export function pathsWithRates(now) {
  const before = past[0], span = before ? now.unix_s - before.unix_s : 0;
  const known = new Map((before?.paths ?? []).map((path) => [path.path, path.nbytes]));
  return now.paths.map((path) => {
    const more = path.nbytes - (known.get(path.path) ?? path.nbytes);
    return { ...path, rate: span > 0 ? Math.max(0, more) / span : 0 };
  });
}
