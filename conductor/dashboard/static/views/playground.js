// The playground: a prompt, its streamed answer, and a link to its timeline.
import { byId, element } from "../elements.js";

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function send(output, answered) {
  const text = element("pre");
  output.replaceChildren(text);
  const headers = { "Content-Type": "application/json" };
  const key = byId("api-key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = JSON.stringify({ prompt: byId("prompt").value, max_tokens: Number(byId("max-tokens").value), stream: true });
  const response = await fetch("/v1/completions", { method: "POST", headers, body });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    text.textContent += event.choices[0]?.text ?? "";
    answered(event.id);
  }
}

export function mount(root, page) {
  const form = root.querySelector("form"), output = root.querySelector("output"), link = root.querySelector("a.timeline");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button[type=submit]");
    button.disabled = true;
    link.hidden = true;
    try {
      await send(output, (id) => {
        link.href = page.timelineHref(id);
        link.hidden = false;
      });
    } catch (error) {
      output.append(element("p", error.message, "bad"));
    } finally {
      button.disabled = false;
    }
  });
  return { draw() {}, recolour() {}, unmount() {} };
}
