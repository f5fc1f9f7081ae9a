// Streams the response of the playground. All other pages work without JavaScript.
"use strict";
(() => {
  const form = document.getElementById("playground");
  if (!form) return;
  const answer = document.getElementById("answer");
  const show = (name, value) => {
    document.querySelector(`[data-figure="${name}"]`).textContent = value;
  };

  async function send(event) {
    event.preventDefault();
    const fields = new FormData(form);
    const button = form.querySelector("button");
    button.disabled = true;
    answer.textContent = "";
    const began = performance.now();
    let first = 0;
    let came = 0;
    const priced = form.querySelector('[name="model"]').selectedOptions[0].dataset;
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { "content-type": "application/json", authorization: `Bearer ${fields.get("key")}` },
        body: JSON.stringify({
          model: fields.get("model"),
          max_tokens: Number(fields.get("max_tokens")),
          stream: true,
          stream_options: { include_usage: true },
          messages: [{ role: "user", content: fields.get("prompt") }],
        }),
      });
      if (!response.ok) {
        const problem = await response.json();
        answer.textContent = problem.error.message;
        return;
      }
      for await (const chunk of events(response)) {
        const text = chunk.choices?.[0]?.delta?.content ?? "";
        if (text && !first) {
          first = performance.now();
          show("first", `${Math.round(first - began)} ms`);
        }
        answer.textContent += text;
        if (text) {
          came += 1;
          show("output", came);
          show("cost", cost(priced, 0, 0, came));
        }
        if (chunk.usage) figures(chunk.usage, first, priced);
        if (chunk.error) answer.textContent += `\n${chunk.error.message}`;
      }
    } catch (problem) {
      answer.textContent = `The server did not answer: ${problem.message}`;
    } finally {
      button.disabled = false;
    }
  }

  // Picounits per token are integers; totals stay far below 2^53.
  function cost(priced, prompt, cached, output) {
    if (!priced.currency) return "–";
    const [input, reused, written] = priced.units.split(" ").map(Number);
    const units = (prompt - cached) * input + cached * reused + output * written;
    return `${(units / 1e12).toFixed(8)} ${priced.currency}`;
  }

  function figures(usage, first, priced) {
    const seconds = (performance.now() - first) / 1000;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const share = usage.prompt_tokens ? Math.round((100 * cached) / usage.prompt_tokens) : 0;
    show("prompt", usage.prompt_tokens);
    show("cached", `${cached} (${share} %)`);
    show("output", usage.completion_tokens);
    if (usage.completion_tokens > 1) show("speed", ((usage.completion_tokens - 1) / seconds).toFixed(1));
    show("cost", cost(priced, usage.prompt_tokens, cached, usage.completion_tokens));
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

  form.addEventListener("submit", send);
})();
