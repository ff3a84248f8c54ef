// One request's timeline: where its time went, the spans of each process, placements and their reasons.
import { cell, element, format, row, scrolling, seconds, table, within } from "../elements.js";
import { waterfall } from "./waterfall.js";

// Colours of parts: waiting, moving, computing, again.
const KINDS = {
  "no node": "wait", asked: "wait", queue: "wait", batch: "wait", room: "wait",
  "host load": "move", "disk load": "move", fetch: "move", stream: "move", messages: "move", transfer: "move", migration: "move",
  api: "wait", prompts: "wait", exchange: "wait", speculation: "again",
  prefill: "compute", decode: "compute", detokenize: "compute",
  recompute: "again", failed: "again", "index lag": "again",
};

function facts(values) {
  return Object.entries(values).flatMap(([key, value]) => {
    if (!value || Array.isArray(value)) return []; // zero or empty: nothing to show
    if (typeof value === "object") return value.detail ? [value.detail] : [];
    if (typeof value === "number" && key.endsWith("_s")) return [`${key.slice(0, -2).replaceAll("_", " ")} ${seconds(value)}`];
    return [`${key.replaceAll("_", " ")} ${typeof value === "number" ? format.format(value) : value}`];
  }).join(", ");
}

const line = (span) => `${span.process} · ${span.name}`;

function spansPicture(spans) {
  const end_s = Math.max(...spans.map((span) => span.began_s + span.seconds), 1e-6);
  const processes = [...new Set(spans.map((span) => span.process))];
  const lines = [...new Set(spans.map(line))].map((label) => ({
    label,
    marks: spans.filter((span) => line(span) === label).map((span) => ({
      from_s: span.began_s, seconds: span.seconds, className: `process-${processes.indexOf(span.process) % 4}`,
      title: `${label}: ${seconds(span.seconds)}, ${facts(span.facts)}`,
    })),
  }));
  const made = waterfall("Process · span", lines, end_s);
  made.classList.add("spans");
  return made;
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

// Where a sequence's time went: its longest part as a sentence, and its parts one after the other.
function timeSpent({ parts, explanation }) {
  if (!parts?.length) return [];
  const whole_s = parts.reduce((sum, part) => sum + part.seconds, 0);
  let from_s = 0;
  const lines = parts.map((part) => {
    const mark = { from_s, seconds: part.seconds, className: KINDS[part.name] ?? "other", title: `${part.sentence}: ${seconds(part.seconds)}` };
    from_s += part.seconds;
    return { label: part.sentence, marks: [mark], values: [seconds(part.seconds), `${(100 * part.seconds / whole_s).toFixed(1)} %`] };
  });
  const made = waterfall("Where the time went", lines, whole_s, ["time", "share"]);
  made.classList.add("parts");
  return [element("p", explanation, "longest"), made];
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
  return [...several.flatMap(timeSpent), element("p", why, "why"), ...(spans.length ? [spansPicture(spans)] : []),
    ...(tables.length ? [within("details", "candidates", element("summary", "Candidates"), box)] : []), list];
}
