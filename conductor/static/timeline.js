// One request, drawn: what each process did, from when to when.
import { byId, element, format, row, seconds, svg } from "./draw.js";

const LINE = 22, NAME = 150, WIDTH = 620;

async function json(path) {
  const response = await fetch(path, { cache: "no-store" });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message ?? response.statusText);
  return answer;
}

function facts(values) {
  return Object.entries(values).flatMap(([key, value]) => {
    if (value === "" || value === null || Array.isArray(value)) return [];
    if (typeof value === "object") return value.detail ? [value.detail] : [];
    if (typeof value === "number" && key.endsWith("_s")) return [`${key.slice(0, -2)} ${seconds(value)}`];
    return [`${key} ${typeof value === "number" ? format.format(value) : value}`];
  }).join(", ");
}

function drawSpans(picture, spans) {
  const end = Math.max(...spans.map((span) => span.began_s + span.seconds), 1e-6);
  const lines = [...new Set(spans.map((span) => `${span.process} · ${span.name}`))];
  const height = lines.length * LINE + 20;
  picture.setAttribute("viewBox", `0 0 ${NAME + WIDTH + 20} ${height}`);
  picture.setAttribute("width", NAME + WIDTH + 20);
  picture.setAttribute("height", height);
  picture.setAttribute("aria-label", `What was done in ${seconds(end)}; the list below says the same`);
  const x = (at) => NAME + Math.max(0, Math.min(at / end, 1)) * WIDTH;
  const processes = [...new Set(spans.map((span) => span.process))];
  const parts = lines.map((line, number) => svg("text", { x: 0, y: number * LINE + 15 }, line));
  for (const span of spans) {
    const y = lines.indexOf(`${span.process} · ${span.name}`) * LINE + 5;
    const colour = `process-${processes.indexOf(span.process) % 4}`;
    const mark = span.seconds
      ? svg("rect", { x: x(span.began_s), y, width: Math.max(2, x(span.began_s + span.seconds) - x(span.began_s)), height: 12, rx: 2, class: colour })
      : svg("circle", { cx: x(span.began_s), cy: y + 6, r: 4, class: colour });
    mark.append(svg("title", {}, `${span.process} ${span.name}: ${seconds(span.seconds)}, ${facts(span.facts)}`));
    parts.push(mark);
  }
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(svg("text", { x: NAME + share * WIDTH, y: height - 4, class: "soft", "text-anchor": share === 1 ? "end" : "start" }, seconds(share * end) === "–" ? "0" : seconds(share * end)));
  }
  picture.replaceChildren(...parts);
}

function candidates(table, events) {
  const placed = events.filter((event) => event.event === "placed").map((event) => event.placement);
  const rows = placed.flatMap((placement) => [
    ...placement.prefill_candidates.map((one) => row("prefill", one.node_id, one.node_id === placement.prefill ? "chosen" : "", `first token in ${seconds(one.ttft_s)}`, `holds ${one.local_tokens ?? 0} tokens`)),
    ...placement.decode_candidates.map((one) => row("decode", one.node_id, one.node_id === placement.decode ? "chosen" : "", `waits ${seconds(one.wait_s)}`, `a step ${seconds(one.step_s)}`)),
  ]);
  table.tBodies[0].replaceChildren(...rows);
}

export async function showTimeline(id) {
  const path = `/v1/requests/${encodeURIComponent(id)}/timeline`;
  const box = byId("timeline");
  box.querySelector("h2").textContent = id;
  box.querySelector("a").href = path;
  try {
    const timeline = await json(path);
    const several = timeline.sequences ?? [timeline];
    const events = several.flatMap((one) => one.events ?? []);
    box.querySelector(".why").textContent = several.map((one) => one.summary?.detail).filter(Boolean).join(" · ");
    drawSpans(box.querySelector("svg"), several.flatMap((one) => one.spans ?? []));
    candidates(box.querySelector("table"), events);
    box.querySelector("ol").replaceChildren(...events.map(({ event, at_s, unix_s, ...rest }) => {
      const item = element("li");
      item.append(element("b", event), element("span", seconds(at_s) === "–" ? "0 ms" : seconds(at_s)), element("small", facts(rest)));
      return item;
    }));
  } catch (error) {
    box.querySelector(".why").textContent = error.message;
    for (const part of box.querySelectorAll("svg, tbody, ol")) part.replaceChildren();
  }
  box.showModal();
}
