// One request's timeline: the spans of each process, placements and their reasons.
import { cell, element, format, row, scrolling, seconds, svg, table, within } from "./elements.js";

const LINE = 22, NAME = 190, WIDTH = 620;

function facts(values) {
  return Object.entries(values).flatMap(([key, value]) => {
    if (!value || Array.isArray(value)) return []; // zero or empty: nothing to show
    if (typeof value === "object") return value.detail ? [value.detail] : [];
    if (typeof value === "number" && key.endsWith("_s")) return [`${key.slice(0, -2).replaceAll("_", " ")} ${seconds(value)}`];
    return [`${key.replaceAll("_", " ")} ${typeof value === "number" ? format.format(value) : value}`];
  }).join(", ");
}

const line = (span) => `${span.process} · ${span.name}`;
const short = (name) => (name.length > 30 ? `${name.slice(0, 29)}…` : name);

function spanMark(span, x, y, className) {
  const mark = span.seconds
    ? svg("rect", { x: x(span.began_s), y, width: Math.max(2, x(span.began_s + span.seconds) - x(span.began_s)), height: 12, rx: 2, class: className })
    : svg("circle", { cx: x(span.began_s), cy: y + 6, r: 4, class: className });
  mark.append(svg("title", {}, `${span.process} ${span.name}: ${seconds(span.seconds)}, ${facts(span.facts)}`));
  return mark;
}

function spansPicture(spans) {
  const end = Math.max(...spans.map((span) => span.began_s + span.seconds), 1e-6);
  const lines = [...new Set(spans.map(line))], processes = [...new Set(spans.map((span) => span.process))];
  const width = NAME + WIDTH + 20, height = lines.length * LINE + 20;
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `Spans of ${seconds(end)}; the list below has the same data`,
  });
  const x = (at) => NAME + Math.max(0, Math.min(at / end, 1)) * WIDTH;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const at = x(share * end);
    picture.append(svg("line", { x1: at, x2: at, y1: 0, y2: height - 18, class: "tick" }));
    picture.append(svg("text", { x: at, y: height - 4, class: "soft", "text-anchor": share === 1 ? "end" : "start" }, share ? seconds(share * end) : "0"));
  }
  lines.forEach((name, number) => {
    const text = svg("text", { x: 0, y: number * LINE + 15 }, short(name));
    text.append(svg("title", {}, name));
    picture.append(text);
  });
  for (const span of spans) {
    picture.append(spanMark(span, x, lines.indexOf(line(span)) * LINE + 5, `process-${processes.indexOf(span.process) % 4}`));
  }
  return scrolling("Spans", picture);
}

// The candidates: estimated cost of each beside the chosen one.
function verdict(mine, chosen) {
  if (mine.node_id === chosen?.node_id) return cell("chosen", "good");
  const later = (mine.ttft_s ?? mine.total_s) - (chosen?.ttft_s ?? chosen?.total_s);
  if (!Number.isFinite(later)) return cell("not chosen", "soft");
  const by = seconds(Math.abs(later));
  return cell(by === "–" ? "as early, not chosen" : `${by} ${later > 0 ? "later" : "earlier, but would delay others"}`, "soft");
}

const time = (value) => cell(value ? seconds(value) : "0", "number");

function candidates(events) {
  const made = [];
  for (const { placement } of events.filter((event) => event.event === "placed")) {
    const of = (list, id) => list.find((one) => one.node_id === id);
    const prefill = of(placement.prefill_candidates, placement.prefill);
    made.push(table(
      ["prefill node", "verdict", "first token in", "queue", "fetch", "load", "compute", "cached tokens", "fetched tokens"],
      placement.prefill_candidates.map((one) => row(one.node_id, verdict(one, prefill), time(one.ttft_s), time(one.queue_s),
        time(one.fetch_s), time(one.load_s), time(one.compute_s), one.local_tokens ?? 0, one.fetched_tokens ?? 0)),
    ));
    const decode = of(placement.decode_candidates, placement.decode);
    if (decode) made.push(table(
      ["decode node", "verdict", "last token in", "wait for room", "transfer", "a step", "running", "cached tokens"],
      placement.decode_candidates.map((one) => row(one.node_id, verdict(one, decode), time(one.total_s), time(one.wait_s),
        time(one.transfer_s), time(one.step_s), one.num_running ?? 0, one.local_tokens ?? 0)),
    ));
  }
  return made;
}

// Where a sequence's time went: its longest part as a sentence, all of them in a table.
function timeSpent({ parts, explanation }) {
  if (!parts?.length) return [];
  const whole = parts.reduce((sum, part) => sum + part.seconds, 0);
  const rows = [...parts].sort((one, other) => other.seconds - one.seconds).map((part) =>
    row(part.sentence, time(part.seconds), cell(`${(100 * part.seconds / whole).toFixed(1)} %`, "number")));
  const box = scrolling("Where the time went", table(["part", "time", "share"], rows));
  return [element("p", explanation, "longest"),
    within("details", "parts", element("summary", "Where the time went"), box)];
}

// The whole timeline as elements. ``timeline``: the JSON of /v1/requests/ID/timeline.
export function timelineView(timeline) {
  const several = timeline.sequences ?? [timeline];
  const events = several.flatMap((one) => one.events ?? []);
  const why = several.map((one) => one.summary?.detail).filter(Boolean).join(" · ");
  const spans = several.flatMap((one) => one.spans ?? []);
  const tables = candidates(events);
  const list = within("ol", "what", ...events.map(({ event, at_s, unix_s, ...rest }) => within("li", "",
    element("b", event.replaceAll("_", " ")), element("span", at_s ? seconds(at_s) : "0 ms"), element("small", facts(rest)))));
  const box = scrolling("Candidates", ...tables);
  return [element("p", why, "why"), ...several.flatMap(timeSpent), ...(spans.length ? [spansPicture(spans)] : []),
    ...(tables.length ? [within("details", "candidates", element("summary", "Candidates"), box)] : []), list];
}
