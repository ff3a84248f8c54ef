// Results of `moonpool bench … --json`: their list, and one of them drawn.
import { element, json, within } from "../elements.js";
import { benchmarkView, verdictOf } from "../panels/benchmark_report.js";

const LISTED_MS = 60000; // interval between checks for new results

export function mount(root, page) {
  const [listed, result] = root.querySelectorAll("section"), box = listed.querySelector(".list");
  const title = result.querySelector("h3"), verdict = result.querySelector(".title p"), figures = result.querySelector(".scroll");
  let files = [], drawn = "";

  async function list() {
    try {
      files = (await json("/v1/benchmarks")).data;
    } catch { /* the status already says that the conductor does not answer */ }
    show();
  }

  function entry(one, chosen) {
    const told = one.problem ?? `${one.date.slice(0, 10)} · ${one.num_rows} figures${one.num_limits ? ` · ${one.num_reached} of ${one.num_limits} limits` : ""}`;
    const name = element(one.problem ? "b" : "a", one.name);
    if (!one.problem) name.href = page.with({ file: one.name });
    if (one === chosen) name.setAttribute("aria-current", "true");
    return within("li", "", name, element("small", told, one.problem ? "bad" : "soft"));
  }

  async function show() {
    // Without a choice, the latest result.
    const chosen = files.find((one) => one.name === page.param("file")) ?? files.find((one) => !one.problem);
    box.replaceChildren(...files.map((one) => entry(one, chosen)));
    listed.querySelector(".none").hidden = files.length > 0;
    box.parentElement.hidden = files.length === 0;
    result.hidden = !chosen;
    const version = JSON.stringify(chosen);
    if (!chosen || version === drawn) return;
    drawn = version;
    title.textContent = chosen.name;
    try {
      const report = await json(`/v1/benchmarks/${encodeURIComponent(chosen.name)}`);
      if (drawn !== version) return;
      verdict.textContent = verdictOf(report.rows);
      figures.replaceChildren(...benchmarkView(report));
      figures.scrollTop = 0;
    } catch (error) {
      if (drawn !== version) return;
      drawn = ""; // it is read again with the list
      verdict.textContent = "";
      figures.replaceChildren(element("p", error.message, "bad"));
    }
  }

  list();
  const timer = setInterval(() => { if (!document.hidden) list(); }, LISTED_MS);
  return { draw() {}, changed: show, recolour() {}, unmount: () => clearInterval(timer) };
}
