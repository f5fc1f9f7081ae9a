// The playground: streams the answers of one or two models. All other pages work without JavaScript.
"use strict";
(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  const panes = [...document.querySelectorAll(".pane")];
  const histories = panes.map(() => []);
  const field = (name) => form.elements.namedItem(name);
  let key = "";

  function show(pane, name, value) {
    pane.querySelector(`[data-figure="${name}"]`).textContent = value;
  }

  function say(pane, role, text) {
    const line = document.createElement("p");
    line.className = role;
    line.textContent = text;
    pane.querySelector(".answer").append(line);
    return line;
  }

  // A key of this page alone, made on the first request; where the role makes no keys, it is typed.
  async function secret() {
    if (field("key")) return field("key").value;
    if (key) return key;
    const answer = await fetch(form.dataset.keys, { method: "POST", body: new URLSearchParams({ project_id: field("project_id").value }) });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    key = body.secret;
    return key;
  }

  function bodyOf(model, history) {
    const system = field("system").value.trim();
    const body = {
      model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
      max_tokens: Number(field("max_tokens").value),
    };
    for (const name of ["temperature", "top_p", "seed"]) {
      if (field(name).value !== "") body[name] = Number(field(name).value);
    }
    const schema = parsed("schema");
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
    const tools = parsed("tools");
    if (tools) body.tools = tools;
    return body;
  }

  // The JSON of a field; what cannot be read is said by the field itself and stops the form.
  function parsed(name) {
    const input = field(name);
    let value = null;
    let problem = "";
    try {
      if (input.value.trim()) value = JSON.parse(input.value);
      if (name === "tools" && value && !Array.isArray(value)) problem = "This is not a list of tools.";
    } catch (error) {
      problem = `This is not JSON: ${error.message}`;
    }
    input.setCustomValidity(problem);
    return problem ? null : value;
  }

  // A call's name comes first, its arguments in pieces.
  function callText(deltas) {
    return (deltas ?? []).map(({ function: called }) => `${called?.name ? `\ncall ${called.name} ` : ""}${called?.arguments ?? ""}`).join("");
  }

  async function ask(pane, model, history) {
    const body = { ...bodyOf(model, history), stream: true, stream_options: { include_usage: true } };
    const priced = [...field("model").options].find((option) => option.value === model).dataset;
    const line = say(pane, "assistant", "");
    const began = performance.now();
    let first = 0;
    let count = 0;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", authorization: `Bearer ${await secret()}` },
        body: JSON.stringify(body),
      });
      if (response.status === 401) key = "";
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const chunk of events(response)) {
        const delta = chunk.choices?.[0]?.delta;
        const text = (delta?.content ?? "") + callText(delta?.tool_calls);
        if (text && !first) {
          first = performance.now();
          show(pane, "first", `${Math.round(first - began)} ms`);
        }
        line.textContent += text;
        if (text) {
          count += 1;
          show(pane, "output", count);
          show(pane, "cost", cost(priced, 0, 0, count));
        }
        if (chunk.usage) figures(pane, chunk.usage, first, priced);
        if (chunk.error) throw new Error(chunk.error.message);
      }
      history.push({ role: "assistant", content: line.textContent });
      return true;
    } catch (problem) {
      history.pop();
      line.className = "problem";
      line.textContent += `${line.textContent ? "\n" : ""}${problem.message}`;
      return false;
    }
  }

  // As on the other pages: two significant digits below a tenth, so that a fraction of a cent is not nothing.
  function amount(value) {
    if (value === 0 || value >= 0.1) return value.toFixed(2);
    return value.toFixed(Math.max(2, 1 - Math.floor(Math.log10(value))));
  }

  // Picounits per token are integers; totals stay far below 2^53.
  function cost(priced, prompt, cached, output) {
    if (!priced.currency) return "–";
    const [input, reused, written] = priced.units.split(" ").map(Number);
    const units = (prompt - cached) * input + cached * reused + output * written;
    return `${amount(units / 1e12)} ${priced.currency}`;
  }

  function figures(pane, usage, first, priced) {
    const seconds = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const share = usage.prompt_tokens ? Math.round((100 * cached) / usage.prompt_tokens) : 0;
    show(pane, "prompt", usage.prompt_tokens);
    show(pane, "cached", `${share} % cached`);
    show(pane, "output", usage.completion_tokens);
    if (usage.completion_tokens > 1) show(pane, "speed", ((usage.completion_tokens - 1) / seconds).toFixed(1));
    show(pane, "cost", cost(priced, usage.prompt_tokens, cached, usage.completion_tokens));
  }

  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
      }
    }
  }

  function chosen() {
    return [field("model").value, field("other").value];
  }

  // The messages with what is typed; with nothing typed, those of the last request.
  function asked() {
    const typed = field("prompt").value;
    const sent = histories[0].map(({ role }) => role).lastIndexOf("user");
    if (!typed && sent >= 0) return histories[0].slice(0, sent + 1);
    return [...histories[0], { role: "user", content: typed }];
  }

  function samples() {
    const text = JSON.stringify(bodyOf(chosen()[0], asked()), null, 2);
    const quoted = text.replaceAll("'", "'\\''");
    document.getElementById("curl").textContent =
      `curl ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $TOLLHOUSE_KEY" \\\n  -H 'content-type: application/json' \\\n  -d '${quoted}'`;
    const given = Object.entries(JSON.parse(text)).map(([name, value]) => `    ${name}=${pythonic(value)},`);
    document.getElementById("python").textContent =
      `import os\n\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["TOLLHOUSE_KEY"])\nanswer = client.chat.completions.create(\n${given.join("\n")}\n)\nprint(answer.choices[0].message${"tools" in JSON.parse(text) ? "" : ".content"})`;
    document.getElementById("node").textContent =
      `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${location.origin}/v1", apiKey: process.env.TOLLHOUSE_KEY });\nconst answer = await client.chat.completions.create(${text});\nconsole.log(answer.choices[0].message${"tools" in JSON.parse(text) ? "" : ".content"});`;
  }

  function pythonic(value) {
    if (value === null) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (Array.isArray(value)) return `[${value.map(pythonic).join(", ")}]`;
    if (typeof value !== "object") return JSON.stringify(value);
    return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonic(each)}`).join(", ")}}`;
  }

  function names() {
    chosen().forEach((model, index) => {
      panes[index].hidden = !model;
      panes[index].querySelector("h2").textContent = model || "–";
    });
    samples();
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button:not([type])");
    const words = field("prompt").value;
    button.disabled = true;
    try {
      if (!field("key") && !key) await secret();
    } catch (problem) {
      say(panes[0], "problem", problem.message);
      button.disabled = false;
      return;
    }
    const answered = await Promise.all(chosen().map((model, index) => {
      if (!model) return true;
      histories[index].push({ role: "user", content: words });
      say(panes[index], "user", words);
      return ask(panes[index], model, histories[index]);
    }));
    button.disabled = false;
    // An error keeps what was typed.
    if (answered.every(Boolean) && field("prompt").value === words) field("prompt").value = "";
    samples();
  });
  document.getElementById("again").addEventListener("click", () => {
    histories.forEach((history) => { history.length = 0; });
    panes.forEach((pane) => pane.querySelector(".answer").replaceChildren());
    samples();
  });
  form.addEventListener("input", names);
  names();
})();
