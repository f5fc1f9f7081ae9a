// Adds a slider below each number of the form, and shows the plan of what is set without loading the page.
"use strict";
(() => {
  const ask = document.getElementById("ask");
  const plan = document.getElementById("plan");
  const form = ask && ask.querySelector("form");
  if (!form || !plan) return;
  // Largest value of each slider; all are logarithmic but those that start at 0.
  const most = {
    rate: 1000, prompt: 131072, output: 16384, shared_prefix: 65536, ttft: 10000, tpot: 200,
    adapters: 1000, count: 256, tp: 8, gpu_price: 20,
  };
  let asked = 0;
  let timer = 0;

  async function show() {
    const mine = ++asked;
    const query = new URLSearchParams(new FormData(form)).toString();
    try {
      const answer = await fetch(`${ask.dataset.part}?${query}`, { redirect: "error" });
      if (!answer.ok || mine !== asked) return;
      plan.innerHTML = await answer.text();
      history.replaceState(null, "", `?${query}`);
    } catch {
      // The gateway restarts, or the session has ended: the button still loads the page.
    }
  }

  const steps = 200;
  for (const input of form.querySelectorAll('input[type="number"]')) {
    const top = most[input.name];
    if (!top) continue;
    const whole = input.name !== "gpu_price";
    const slider = document.createElement("input");
    slider.type = "range";
    slider.min = "0";
    slider.max = String(steps);
    slider.setAttribute("aria-label", input.labels[0].querySelector("span").textContent);
    const place = () => {
      slider.value = String((steps * Math.log1p(Number(input.value) || 0)) / Math.log1p(top));
    };
    place();
    slider.addEventListener("input", () => {
      const value = Math.expm1((Number(slider.value) / steps) * Math.log1p(top));
      const shown = whole && value >= 10 ? Number(value.toPrecision(2)) : value;
      input.value = whole ? String(Math.round(shown)) : value.toFixed(2);
      later();
    });
    input.addEventListener("input", () => { place(); later(); });
    input.after(slider);
  }

  function later() {
    clearTimeout(timer);
    timer = setTimeout(show, 60);
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
  ask.dataset.ready = "true";
})();
