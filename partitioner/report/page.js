"use strict";
(() => {
  const root = document.documentElement;
  const remember = (value) => { try { localStorage.setItem("partitioner-theme", value); } catch { /* no storage */ } };
  try { const kept = localStorage.getItem("partitioner-theme"); if (kept) root.dataset.theme = kept; } catch { /* no storage */ }
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme:dark)").matches ? "dark" : "light")) === "dark";
  const theme = document.getElementById("theme");
  const tell = () => { theme.textContent = dark() ? "Light theme" : "Dark theme"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remember(root.dataset.theme); tell(); });
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", tell);
  tell();

  // Tables: sort by a column, show only rows with some words.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => { const cell = row.cells[column]; return cell.dataset.key ?? cell.textContent; };
      const compare = (a, b) => {
        const x = key(a), y = key(b), m = Number(x), n = Number(y);
        const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y, "en", { numeric: true }) : m - n || 0;
        return down ? -order : order;
      };
      const empty = (row) => key(row) === "inf" ? 1 : 0;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 : compare(a, b)));
      table.tBodies[0].append(...rows);
    }));
  }
  for (const field of document.querySelectorAll("input.filter")) {
    const tables = field.dataset.tables.split(" ").map((name) => document.getElementById(name)).filter(Boolean);
    const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
    const words = rows.map((row) => row.textContent.toLowerCase());
    field.addEventListener("input", () => {
      const asked = field.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row, i) => { row.hidden = !words[i].includes(asked); shown += !row.hidden; });
      field.closest(".tools").querySelector(".found").textContent = asked ? `${shown} of ${rows.length} rows` : "";
      for (const table of tables) { // rows that are found are shown, those of a folded table, too
        const folded = table.closest("details");
        if (folded) folded.open = Boolean(asked) && [...table.tBodies[0].rows].some((row) => !row.hidden);
      }
    });
  }

  // Pictures: the view box moves over the drawing. k: pixels per unit of the drawing.
  for (const figure of document.querySelectorAll("figure.picture")) {
    const frame = figure.querySelector(".frame"), svg = frame.querySelector("svg"), details = figure.querySelector(".details");
    const box = svg.getBBox(), margin = 12;
    const whole = { x: box.x - margin, y: box.y - margin, w: box.width + 2 * margin, h: box.height + 2 * margin };
    const readable = 0.8, small = 0.6, most = 12;
    let k = 1, x = whole.x, y = whole.y;
    frame.classList.add("live");
    svg.setAttribute("preserveAspectRatio", "xMinYMin meet");
    const fit = () => Math.min(frame.clientWidth / whole.w, frame.clientHeight / whole.h);
    const clamp = (v, low, high) => Math.max(low, Math.min(high, v));
    const place = () => {
      const w = frame.clientWidth / k, h = frame.clientHeight / k;
      x = w >= whole.w ? whole.x - (w - whole.w) / 2 : clamp(x, whole.x, whole.x + whole.w - w);
      y = h >= whole.h ? whole.y - (h - whole.h) / 2 : clamp(y, whole.y, whole.y + whole.h - h);
      frame.style.touchAction = h >= whole.h ? "pan-y" : "none"; // a finger scrolls the page where nothing else moves
      svg.setAttribute("viewBox", `${x} ${y} ${w} ${h}`);
      frame.dataset.zoom = k.toFixed(3);
    };
    // a picture is shown in its full width where its text is not too small then
    const least = () => Math.min(readable, Math.max(small, frame.clientWidth / whole.w));
    const size = () => {
      if (document.fullscreenElement === figure) return;
      const scale = Math.min(1.25, Math.max(least(), frame.clientWidth / whole.w));
      frame.style.height = `${Math.min(whole.h * scale + 2, Math.max(320, innerHeight * 0.7))}px`;
    };
    const start = () => {
      size();
      k = clamp(fit(), least(), 1.25);
      x = whole.x; y = whole.y;
      place();
      const cut = whole.w * k > frame.clientWidth + 2 || whole.h * k > frame.clientHeight + 2;
      figure.querySelector(".cut").hidden = !cut;
    };
    const zoom = (factor, px = frame.clientWidth / 2, py = frame.clientHeight / 2) => {
      const ux = x + px / k, uy = y + py / k;
      k = clamp(k * factor, Math.min(fit(), 1), most);
      x = ux - px / k; y = uy - py / k;
      place();
    };
    const fitWhole = () => { k = Math.min(fit(), 2); x = whole.x; y = whole.y; place(); };
    const move = (dx, dy) => { x += dx / k; y += dy / k; place(); };
    const orders = {
      in: () => zoom(1.4), out: () => zoom(1 / 1.4), fit: fitWhole,
      whole: () => document.fullscreenElement ? document.exitFullscreen() : figure.requestFullscreen?.(),
    };
    for (const button of figure.querySelectorAll("button[data-do]"))
      button.addEventListener("click", () => orders[button.dataset.do]());
    const step = 60;
    const keys = {
      ArrowLeft: () => move(-step, 0), ArrowRight: () => move(step, 0), ArrowUp: () => move(0, -step), ArrowDown: () => move(0, step),
      "+": orders.in, "=": orders.in, "-": orders.out, 0: fitWhole,
    };
    frame.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      keys[event.key]();
      event.preventDefault();
    });
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== frame) return;
      const at = frame.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 300), event.clientX - at.left, event.clientY - at.top);
      event.preventDefault();
    }, { passive: false });

    const described = (node) => {
      for (let e = node; e && e !== frame; e = e.parentElement) {
        const title = [...e.children].find((child) => child.tagName === "title");
        if (title) return title.textContent;
      }
      return "";
    };
    const show = (node) => { const text = described(node); if (text && details.textContent !== text) details.textContent = text; };
    const held = new Map();
    let gone = 0;
    frame.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      held.set(event.pointerId, event);
      gone = 0;
      try { frame.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
      frame.classList.add("moving");
    });
    frame.addEventListener("pointermove", (event) => {
      const last = held.get(event.pointerId);
      if (!last) { if (event.pointerType === "mouse") show(event.target); return; }
      const dx = event.clientX - last.clientX, dy = event.clientY - last.clientY;
      gone += Math.abs(dx) + Math.abs(dy);
      if (held.size === 2) {
        const other = [...held.values()].find((p) => p.pointerId !== event.pointerId);
        const apart = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY) || 1;
        const at = frame.getBoundingClientRect();
        zoom(apart(event) / apart(last), (event.clientX + other.clientX) / 2 - at.left, (event.clientY + other.clientY) / 2 - at.top);
        move(-dx / 2, -dy / 2);
      } else move(-dx, -dy);
      held.set(event.pointerId, event);
    });
    const release = (event) => {
      if (!held.delete(event.pointerId)) return;
      if (!held.size) frame.classList.remove("moving");
      if (gone < 5) show(document.elementFromPoint(event.clientX, event.clientY));
    };
    for (const name of ["pointerup", "pointercancel"]) frame.addEventListener(name, release);

    start();
    new ResizeObserver(() => { size(); place(); }).observe(frame);

    const field = figure.querySelector("input.search"), status = figure.querySelector(".found");
    if (!field) continue;
    const parts = [...svg.querySelectorAll("g")].filter((g) => [...g.children].some((c) => c.tagName === "title"));
    const texts = parts.map((part) => part.textContent.toLowerCase());
    let matches = [], at = -1;
    const goTo = (number) => {
      matches.forEach((part) => part.classList.remove("current"));
      if (!matches.length) return;
      at = (number + matches.length) % matches.length;
      const part = matches[at], seen = part.getBoundingClientRect(), edge = frame.getBoundingClientRect();
      const found = { x: x + (seen.left - edge.left) / k, y: y + (seen.top - edge.top) / k, width: seen.width / k, height: seen.height / k };
      part.classList.add("current");
      k = clamp(Math.min(frame.clientWidth / (found.width + 80), frame.clientHeight / (found.height + 80)), Math.min(k, readable), 1.5);
      x = found.x + found.width / 2 - frame.clientWidth / k / 2;
      y = found.y + found.height / 2 - frame.clientHeight / k / 2;
      place();
      show(part);
      status.textContent = `${at + 1} of ${matches.length}`;
    };
    field.addEventListener("input", () => {
      parts.forEach((part) => part.classList.remove("match", "current"));
      const asked = field.value.trim().toLowerCase();
      matches = asked ? parts.filter((part, i) => texts[i].includes(asked)) : [];
      matches = matches.filter((part) => !matches.some((other) => other !== part && part.contains(other)));
      matches.forEach((part) => part.classList.add("match"));
      status.textContent = asked && !matches.length ? "nothing found" : "";
      at = -1;
      goTo(0);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { goTo(at + (event.shiftKey ? -1 : 1)); event.preventDefault(); }
    });
  }
})();
