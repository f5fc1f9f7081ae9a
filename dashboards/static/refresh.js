// Keeps a part of the page up to date: every few seconds, while it is seen and nothing in it has the focus.
"use strict";
(() => {
  const every = 3000;
  const part = document.querySelector("[data-refresh]");
  if (!part) return;

  async function refresh() {
    if (document.hidden || part.contains(document.activeElement)) return;
    try {
      const answer = await fetch(part.dataset.refresh, { redirect: "error" });
      if (!answer.ok) return;
      const text = await answer.text();
      if (!part.contains(document.activeElement)) part.innerHTML = text;
    } catch {
      // The gateway restarts, or the session has ended: what is shown stays, with its time.
    }
  }

  setInterval(refresh, every);
  part.dataset.refreshed = "ready";
})();
