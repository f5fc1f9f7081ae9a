// Keyboard: a command palette (Ctrl+K), help (?) and the query bar (/). And a live list of requests, by server-sent events.
"use strict";
(() => {
  const root = document.documentElement;
  const links = [...document.querySelectorAll(".side li a, .chips a")];
  if (!links.length) return;

  // A long navigation shows where the page is in it.
  const side = document.getElementById("sections");
  const current = side.querySelector("[aria-current]")?.getBoundingClientRect();
  if (current && current.bottom > side.clientHeight) side.scrollTop += current.bottom - side.clientHeight / 2;

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
  const input = element("input", "", { type: "search", "aria-label": "Go to", placeholder: "Go to a page, do something, or type a query such as status:5xx" });
  const list = element("ul", "");
  palette.append(input, list);
  let chosen = 0;

  // What the buttons of the navigation do: the colour scheme, signing out, and for operators another tenant.
  function commands(typed) {
    const schemes = [...document.querySelectorAll(".theme button")];
    const out = document.querySelector('form[action$="/sign-out"] button');
    const tenant = document.querySelector(".choose");
    return [
      ...schemes.map((button) => ({ words: `Colour scheme: ${button.textContent}`, does: () => button.click() })),
      { words: "Keyboard help", does: () => { palette.close(); help.showModal(); } },
      ...(out ? [{ words: "Sign out", does: () => out.click() }] : []),
      ...(tenant && typed && !isQuery(typed) ? [{ words: `View the tenant ${typed}`, always: true, does: () => { tenant.elements.namedItem("tenant").value = typed; tenant.requestSubmit(); } }] : []),
    ];
  }

  function isQuery(typed) {
    return /[:<>]|^req_/.test(typed);
  }

  function listed() {
    const words = input.value.trim().toLowerCase();
    const found = links.filter((link) => link.textContent.toLowerCase().includes(words))
      .map((link) => ({ words: link.textContent.trim(), href: link.href }));
    found.push(...commands(input.value.trim()).filter((each) => each.always || each.words.toLowerCase().includes(words)));
    const requests = links.find((link) => link.pathname.endsWith("/requests"));
    if (words && requests && isQuery(words)) {
      found.push({ words: `Requests: ${input.value}`, href: `${requests.pathname}?q=${encodeURIComponent(input.value)}` });
    }
    return found;
  }

  function draw() {
    const found = listed();
    chosen = Math.max(0, Math.min(chosen, found.length - 1));
    list.replaceChildren(...found.map(({ words, href, does }, index) => {
      const item = document.createElement("li");
      const chosenNow = { "aria-selected": String(index === chosen) };
      const entry = element(does ? "button" : "a", words, does ? { type: "button", ...chosenNow } : { href, ...chosenNow });
      if (does) entry.addEventListener("click", does);
      item.append(entry);
      return item;
    }));
    list.children[chosen]?.scrollIntoView({ block: "nearest" });
  }

  input.addEventListener("input", () => { chosen = 0; draw(); });
  palette.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { chosen += step; draw(); event.preventDefault(); }
    if (event.key === "Enter") {
      list.children[chosen]?.firstElementChild.click();
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
    } else if (event.key === "Escape") {
      document.querySelectorAll("details.panel[open]").forEach((panel) => { panel.open = false; });
    } else if (!typing && event.key === "?") {
      if (!help.open) help.showModal();
    } else if (!typing && event.key === "/") {
      const query = document.querySelector('[name="q"]');
      if (query) { event.preventDefault(); query.focus(); query.select(); }
    }
  });

  // New requests are streamed to the top of the list.
  const live = document.getElementById("live");
  if (!live) return;
  const button = element("button", "Live", { type: "button", class: "quiet", "aria-pressed": "false" });
  live.append(button);
  live.hidden = false;
  const shownRows = 50;
  let source = null;

  function insert(html) {
    const list = document.querySelector("main .scroll tbody");
    if (!list) { location.reload(); return; }
    const made = document.createElement("template");
    made.innerHTML = html;
    const row = made.content.firstElementChild;
    const href = row.querySelector("a").getAttribute("href");
    if ([...list.querySelectorAll("a")].some((link) => link.getAttribute("href") === href)) return;
    row.classList.add("fresh");
    list.prepend(row);
    while (list.rows.length > shownRows) list.rows[shownRows].remove();
  }

  function start() {
    source = new EventSource(`${location.pathname}/live${location.search}`);
    source.onmessage = (event) => insert(event.data);
    source.onopen = () => { button.textContent = "Live"; };
    source.onerror = () => { button.textContent = "Live (connecting)"; };
  }

  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    source?.close();
    if (on) start();
  });
  root.dataset.keys = "ready";
})();
