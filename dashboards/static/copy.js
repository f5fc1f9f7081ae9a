// Adds a copy button to ids, secrets and code samples. Without JavaScript they can be selected.
"use strict";
(() => {
  const status = document.createElement("p");
  status.className = "toast";
  status.setAttribute("role", "status");
  status.hidden = true;
  document.body.append(status);
  let timer = 0;

  function say(words) {
    status.textContent = words;
    status.hidden = false;
    clearTimeout(timer);
    timer = setTimeout(() => { status.hidden = true; }, 2500);
  }

  // Browsers give the clipboard to pages on TLS and localhost only; elsewhere the text is selected.
  async function copy(source) {
    try {
      await navigator.clipboard.writeText(source.textContent);
      say("Copied.");
    } catch {
      getSelection().selectAllChildren(source);
      say("Selected. Press Ctrl+C to copy.");
    }
  }

  for (const source of document.querySelectorAll("[data-copy]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `copy ${source.dataset.copy}`;
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy ${source.dataset.name ?? source.textContent.slice(0, 40)}`);
    button.addEventListener("click", () => copy(source));
    source.after(button);
  }
})();
