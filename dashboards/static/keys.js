// Keyboard: a command palette (Ctrl+K), help (?) and the query bar (/). And a live list of requests.
"use strict";
(() => {
  const root = document.documentElement;
  const links = [...document.querySelectorAll(".side li a, .chips a")];
  if (!links.length) return;

  function dialogOf(name) {
    const dialog = document.createElement("dialog");
    dialog.setAttribute("aria-label", name);
    document.body.append(dialog);
    return dialog;
  }

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  const palette = dialogOf("Commands");
  const input = element("input", "", { type: "search", "aria-label": "Go to", placeholder: "Go to a page, or type a query such as status:5xx" });
  const list = element("ul", "");
  palette.append(input, list);
  let chosen = 0;

  function listed() {
    const words = input.value.trim().toLowerCase();
    const found = links.filter((link) => link.textContent.toLowerCase().includes(words))
      .map((link) => ({ words: link.textContent.trim(), href: link.href }));
    const requests = links.find((link) => link.pathname.endsWith("/requests"));
    if (words && requests && /[:<>]|^req_/.test(words)) {
      found.push({ words: `Requests: ${input.value}`, href: `${requests.pathname}?q=${encodeURIComponent(input.value)}` });
    }
    return found;
  }

  function draw() {
    const found = listed();
    chosen = Math.max(0, Math.min(chosen, found.length - 1));
    list.replaceChildren(...found.map(({ words, href }, index) => {
      const item = document.createElement("li");
      item.append(element("a", words, { href, "aria-selected": String(index === chosen) }));
      return item;
    }));
  }

  input.addEventListener("input", () => { chosen = 0; draw(); });
  palette.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { chosen += step; draw(); event.preventDefault(); }
    if (event.key === "Enter") {
      const link = list.querySelectorAll("a")[chosen];
      if (link) location.assign(link.href);
      event.preventDefault();
    }
  });

  const help = dialogOf("Shortcuts");
  const rows = element("dl", "");
  for (const [key, words] of [["Ctrl+K", "go to a page, or search requests"], ["/", "query bar"], ["?", "this help"], ["Esc", "close"]]) {
    const name = document.createElement("dt");
    name.append(element("kbd", key));
    rows.append(name, element("dd", words));
  }
  help.append(rows);

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select");
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      input.value = "";
      draw();
      if (!palette.open) palette.showModal();
    } else if (!typing && event.key === "?") {
      if (!help.open) help.showModal();
    } else if (!typing && event.key === "/") {
      const query = document.querySelector('[name="q"]');
      if (query) { event.preventDefault(); query.focus(); query.select(); }
    }
  });

  // The newest requests, read again every two seconds while the tab is seen.
  const live = document.getElementById("live");
  if (!live) return;
  const button = element("button", "Live", { type: "button", class: "quiet", "aria-pressed": "false" });
  live.append(button);
  live.hidden = false;
  let timer = 0;

  async function refresh() {
    if (!document.hidden) {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } }).catch(() => null);
      const text = answer?.ok && !answer.redirected ? await answer.text() : "";
      const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main .scroll");
      const shown = document.querySelector("main .scroll, main .empty");
      if (fresh && shown) shown.replaceWith(fresh);
      button.textContent = text ? "Live" : "Live (the server does not answer)";
    }
    if (button.getAttribute("aria-pressed") === "true") timer = setTimeout(refresh, 2000);
  }

  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    clearTimeout(timer);
    if (on) refresh();
  });
  root.dataset.keys = "ready";
})();
