// Lines of bars on one axis of time.
import { cell, element, row, scrolling, seconds, within } from "../elements.js";

const MARKS = [0, 0.5, 1];

function track(marks, total_s) {
  const percent = (value) => `${Math.max(0, Math.min(100, (100 * value) / total_s))}%`;
  return within("td", "track", ...marks.map(({ from_s, seconds: length_s, className, title }) => {
    const mark = element("i", undefined, className);
    mark.style.left = percent(from_s);
    if (length_s) mark.style.width = percent(length_s);
    else mark.classList.add("moment");
    mark.title = title;
    return mark;
  }));
}

// ``lines``: [{label, marks: [{from_s, seconds, className, title}], values}]; ``headings``: of the values.
export function waterfall(title, lines, total_s, headings = []) {
  const axis = within("th", "track axis", ...MARKS.map((share) => {
    const mark = element("span", share ? seconds(share * total_s) : "0");
    mark.style.left = `${100 * share}%`;
    return mark;
  }));
  const head = within("tr", "", element("th", title), axis, ...headings.map((heading) => element("th", heading, "number")));
  for (const th of head.cells) th.scope = "col";
  const rows = lines.map(({ label, marks, values = [] }) => {
    const made = row(label, track(marks, total_s), ...values.map((value) => cell(value, "number")));
    made.cells[0].title = label;
    return made;
  });
  const table = within("table", "waterfall", within("thead", "", head), within("tbody", "", ...rows));
  return scrolling(title, table);
}
