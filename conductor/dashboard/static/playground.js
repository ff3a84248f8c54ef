// The playground: a prompt, its streamed answer, and a link to its timeline.
import { byId, element } from "./elements.js";

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

async function send(form, showTimeline) {
  const output = form.querySelector("output"), text = element("pre");
  output.replaceChildren(text);
  const headers = { "Content-Type": "application/json" };
  const key = byId("api-key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = JSON.stringify({ prompt: byId("prompt").value, max_tokens: Number(byId("max-tokens").value), stream: true });
  const response = await fetch("/v1/completions", { method: "POST", headers, body });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let id = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    id = event.id;
    text.textContent += event.choices[0]?.text ?? "";
  }
  const open = element("button", "Timeline");
  open.type = "button";
  open.onclick = () => showTimeline(id);
  output.append(open);
}

export function start(showTimeline) {
  const form = byId("playground").querySelector("form");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button[type=submit]");
    button.disabled = true;
    try {
      await send(form, showTimeline);
    } catch (error) {
      form.querySelector("output").replaceChildren(element("p", error.message, "bad"));
    } finally {
      button.disabled = false;
    }
  });
}
