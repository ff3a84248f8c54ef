// Draw reports of `moonpool bench … --json`: each figure with its peers, limit and conditions.
import { cell, element, format, row, scrolling, table, within } from "../elements.js";

// Format a figure with about three digits.
function number(value) {
  if (value === undefined) return "";
  if (Math.abs(value) >= 100) return format.format(Math.round(value));
  return value === 0 ? "0" : String(Number(value.toPrecision(3)));
}

// True if the limit holds; undefined without a limit.
export function reached(one) {
  if (one.limit === undefined) return undefined;
  const measured = one.ratio ?? one.value;
  return one.limit === "at least" ? measured >= one.limit_value : measured <= one.limit_value;
}

function groups(rows, names) {
  const found = new Map();
  for (const one of rows) {
    const key = names.map((name) => one[name]).join("\n");
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(one);
  }
  return [...found.values()];
}

function bar(value, full, className, limit) {
  const track = element("span", undefined, "track");
  const filled = element("i", undefined, className);
  filled.style.width = `${Math.max(0, Math.min(100, (100 * value) / full))}%`;
  track.append(filled);
  if (limit !== undefined) {
    const mark = element("i", undefined, "limit");
    mark.style.left = `${Math.min(100, (100 * limit) / full)}%`;
    track.append(mark);
  }
  return within("td", "bar", track);
}

function limitCell(one) {
  const held = reached(one);
  if (held === undefined) return cell("");
  const of = one.ratio === undefined ? "" : "× ";
  return cell(`${one.limit} ${of}${number(one.limit_value)}: ${held ? "reached" : "missed"}`, held ? "good" : "bad");
}

// One measurement with its peers below it.
function measured(name, same, full) {
  const [first] = same;
  const alone = same.find((one) => one.peer === undefined) ?? first;
  const own = { ...alone, ...(alone.ratio === undefined ? {} : { limit: undefined }) };
  const shares = [own.p50, own.p90, own.p95, own.p99];
  const spread = own.p99 === undefined ? "" : shares.map((one) => (one === undefined ? "–" : number(one))).join(" / ");
  const onValue = own.limit !== undefined ? own.limit_value : undefined;
  const lines = [row(name, bar(own.value, full, "", onValue), cell(number(own.value), "number"), cell(spread, "number soft"), cell("", "number"), limitCell(own))];
  for (const one of same.filter((each) => each.peer !== undefined)) {
    const ratio = one.ratio === undefined ? "" : `× ${number(one.ratio)}`;
    lines.push(row(within("th", "peer", one.peer_kind === "limit" ? `limit: ${one.peer}` : one.peer), bar(one.peer_value, full, "peer"), cell(number(one.peer_value), "number soft"), cell(""), cell(ratio, "number"), one.ratio === undefined ? cell("") : limitCell(one)));
  }
  return lines;
}

// Columns that are empty in every row.
function dropEmpty(made) {
  for (let at = made.tHead.rows[0].cells.length - 1; at > 2; at -= 1) {
    const column = [...made.tBodies[0].rows].map((line) => line.cells[at]);
    if (column.every((one) => !one.textContent)) [made.tHead.rows[0].cells[at], ...column].forEach((one) => one.remove());
  }
}

function group(rows, title, name) {
  const unit = rows[0].unit;
  const full = Math.max(...rows.flatMap((one) => [one.value, one.peer_value ?? 0, one.ratio === undefined ? one.limit_value ?? 0 : 0]), 1e-12);
  const lines = groups(rows, ["case", "metric"]).flatMap((same) => measured(same[0][name], same, full));
  const made = table([name, unit, "figure", "p50 / p90 / p95 / p99", "to the peer", "limit"], lines);
  made.classList.add("figures");
  dropEmpty(made);
  return within("figure", "", element("figcaption", title), scrolling(title, made));
}

export function conditions(environment) {
  const versions = Object.entries(environment.versions).map(([name, version]) => `${name} ${version}`).join(", ");
  const commit = environment.commit ? `commit ${environment.commit}, ` : "";
  const code = `${environment.machine}; ${commit}${environment.date.slice(0, 16).replace("T", " ")}; ${versions}`;
  if (!environment.conditions) return code; // older files
  const { models, cache, noise } = environment.conditions;
  const names = models.map((one) => `${one.name} ${one.revision.slice(0, 12)}, weights ${one.weights}, KV ${one.kv}`);
  const held = cache.tokens ? `, ${number(cache.tokens)} tokens` : "";
  return [code, ...names, `cache ${cache.state}${held}`, `load ${noise.load.join(" to ")}`].join("; ");
}

// Draw a report: one chart per metric or one per case, whichever needs fewer charts.
export function benchmarkView(report) {
  const { rows, environment } = report;
  const byMetric = groups(rows, ["metric", "unit"]), byCase = groups(rows, ["case", "unit"]);
  const pictures = byMetric.length <= byCase.length
    ? byMetric.map((same) => group(same, same[0].metric, "case"))
    : byCase.map((same) => group(same, same[0].case, "metric"));
  return [element("p", conditions(environment), "soft conditions"), ...pictures];
}

export function verdictOf(rows) {
  const limits = rows.map(reached).filter((held) => held !== undefined);
  return limits.length ? `${limits.filter(Boolean).length} of ${limits.length} limits reached` : "no limits";
}
