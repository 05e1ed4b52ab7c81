"use strict";
/* What both pages draw: tokens, lives and workers.

   Whatever comes from outside (texts of tokens, ids, errors) becomes text nodes and attributes;
   nothing here makes markup of a string. */
const pictures = (() => {
  const SURPRISE = [-0.1, -0.5, -1, -2, -3.5, -5.5, -8];
  const KINDS = {
    queued: "waits for a place", loading: "asks the offload store", ready: "on a worker, not computed yet",
    prefill: "a chunk of tokens", decode: "tokens one by one", saving: "evicted, being saved",
    paused: "stands still to move", saved: "saved while it goes on", copied: "copied while it goes on",
    resumed: "has a place again", moved: "goes on elsewhere", omitted: "left out", finished: "the end",
  };
  const MOMENTS = new Set(["resumed", "moved", "finished"]);
  const BESIDE = new Set(["saved", "copied"]);

  function el(tag, facts = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(facts)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "class") made.className = value;
      else if (name === "on") for (const [what, call] of Object.entries(value)) made.addEventListener(what, call);
      else made.setAttribute(name, value === true ? "" : String(value));
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  const svg = (tag, facts) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(facts)) made.setAttribute(name, String(value));
    return made;
  };

  /* ---------------------------------------------------------------------------------- words */

  const count = (number) => Math.round(number).toLocaleString("en");
  const many = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;
  const logprob = (value) => (value === null ? "\u2212\u221e" : value.toFixed(4).replace("-", "\u2212"));
  function percent(value) {
    const part = value === null ? 0 : Math.exp(value) * 100;
    if (part >= 0.1 || part === 0) return `${part.toFixed(1)} %`;
    return part >= 1e-4 ? `${part.toFixed(1 - Math.floor(Math.log10(part)))} %` : `${part.toExponential(1)} %`;
  }
  function seconds(value) {
    if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
    if (value < 90) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
    return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  }
  const quoted = (text) => `\u201c${text.replace(/\n/g, "\u21b5\n")}\u201d`;

  /* -------------------------------------------------------------------- tips, and moving about */

  let tip = null;
  let tipOf = null;

  function showTip(target) {
    const lines = target.tip && target.tip();
    if (!lines) return;
    if (tip === null) {
      tip = el("div", { id: "tip", role: "tooltip" });
      document.body.append(tip);
    }
    tip.replaceChildren(...lines);
    tip.hidden = false;
    if (tipOf) tipOf.removeAttribute("aria-describedby");
    tipOf = target;
    target.setAttribute("aria-describedby", "tip");
    placeTip();
  }

  /** Put the tip beside what it is about; away where that is not there or not seen any more. */
  function placeTip() {
    if (tipOf === null) return;
    const target = tipOf;
    const place = target.getClientRects()[0] || target.getBoundingClientRect();
    if (!target.isConnected || place.bottom < 0 || place.top > window.innerHeight) {
      hideTip();
      return;
    }
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const left = Math.max(6, Math.min(place.left, window.innerWidth - width - 6));
    const below = place.bottom + 6;
    const top = below + height < window.innerHeight ? below : Math.max(6, place.top - height - 6);
    tip.style.left = `${left}px`;
    tip.style.top = `${top}px`;
  }

  function hideTip() {
    if (tip !== null) tip.hidden = true;
    if (tipOf) tipOf.removeAttribute("aria-describedby");
    tipOf = null;
  }

  const withTip = (event) => (event.target instanceof Element ? event.target.closest("[data-tip]") : null);
  document.addEventListener("pointerover", (event) => {
    const target = withTip(event);
    if (target) showTip(target);
    else if (!document.activeElement || !document.activeElement.matches("[data-tip]")) hideTip();
  });
  document.addEventListener("focusin", (event) => {
    const target = withTip(event);
    if (target) showTip(target);
    else hideTip();
  });
  document.addEventListener("focusout", hideTip);
  document.addEventListener("scroll", placeTip, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
    const here = withTip(event);
    const list = here && here.closest("[role=listbox]");
    if (!list) return;
    const all = [...list.querySelectorAll("[data-tip]")];
    const at = all.indexOf(here);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1,
      ArrowDown: at + 10, ArrowUp: at - 10 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = all[Math.max(0, Math.min(to, all.length - 1))];
    here.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  /** Make a list whose members show tips: one of them is in the tab order, arrows reach the others. */
  function list(label, className, members) {
    members.forEach((member, place) => {
      member.setAttribute("role", "option");
      member.setAttribute("data-tip", "");
      member.tabIndex = place === 0 ? 0 : -1;
    });
    return el("div", { class: className, role: "listbox", "aria-label": label,
      "aria-orientation": "horizontal" }, ...members);
  }

  /* --------------------------------------------------------------------------------- tokens */

  const shade = (value) => (value === null ? 7 : SURPRISE.filter((limit) => value < limit).length);

  function tokenLegend() {
    const limits = ["\u2265 \u22120.1", ...SURPRISE.slice(0, -1).map((limit, i) =>
      `\u2212${-limit} to \u2212${-SURPRISE[i + 1]}`), "< \u22128"];
    return el("ul", { class: "legend", "aria-label": "Shades of logprobs" },
      ...limits.map((text, i) => el("li", {}, el("span", { class: `swatch p${i}` }), text)),
      el("li", {}, el("span", { class: "t not-first" }, "dotted"), "not the likeliest token"),
      el("li", {}, el("span", { class: "borders" }, el("span", { class: "t chunk" }, "\u00a0")),
        "a chunk begins"));
  }

  /** Where chunks began in a request: position -> its span, from what is known of its life. */
  function chunksOf(spans) {
    const found = new Map();
    for (const [kind, , , worker, first, end, steps] of spans) {
      if (kind === "prefill" && !found.has(first)) found.set(first, { worker, first, end, steps });
    }
    return found;
  }

  const chunkWords = (chunk) => {
    const joined = chunk.steps > 1 ? `${chunk.steps} chunks` : "chunk";
    return `${joined} of tokens ${count(chunk.first)} to ${count(chunk.end - 1)} on ${chunk.worker}`;
  };

  /**
   * Draw tokens as a list.
   * row: ids, texts (or null), logprobs, ranks, tops (per token [[id, text, logprob, rank]]), and
   * parts: [{start, offset, spans}]: which request brought the tokens from number `start` on, where
   * token number j has position j + offset.
   */
  function tokens(row, label) {
    const chunks = row.ids.map(() => null);
    const begins = row.ids.map(() => false);
    (row.parts || []).forEach((part, i) => {
      const until = i + 1 < row.parts.length ? row.parts[i + 1].start : row.ids.length;
      const found = chunksOf(part.spans);
      let current = null;
      for (const [first, chunk] of found) if (first <= part.start + part.offset && part.start + part.offset < chunk.end) current = chunk;
      for (let j = part.start; j < until; j += 1) {
        const chunk = found.get(j + part.offset);
        if (chunk) current = chunk;
        begins[j] = Boolean(chunk) || (j === part.start && i > 0);
        chunks[j] = current;
      }
    });
    const members = row.ids.map((id, j) => {
      const value = row.logprobs[j];
      const isScored = row.ranks[j] !== null;
      const text = row.texts === null ? `\u27e8${id}\u27e9` : row.texts[j];
      const shown = text === "" ? `\u27e8${id}\u27e9` : text.replace(/\n/g, "\u21b5\n");
      const made = el("span", { class: ["t", isScored ? `p${shade(value)}` : "none",
        isScored && row.ranks[j] > 1 ? "not-first" : "", begins[j] ? "chunk" : ""].join(" ").trim() }, shown);
      made.tip = () => tokenTip(row, j, text, chunks[j]);
      return made;
    });
    return list(label, "tokens", members);
  }

  function tokenTip(row, j, text, chunk) {
    const lines = [
      el("div", {}, el("span", { class: "quoted mono" }, quoted(text)),
        el("span", { class: "soft" }, `  id ${row.ids[j]}, token ${count(j)}`)),
    ];
    if (row.ranks[j] === null) {
      lines.push(el("div", {}, "Nothing before it: it has no logprob."));
    } else {
      lines.push(el("div", {}, `logprob ${logprob(row.logprobs[j])} (${percent(row.logprobs[j])}), rank ${count(row.ranks[j])}`));
    }
    const others = row.tops && row.tops[j];
    if (others && others.length) {
      lines.push(el("table", {}, el("caption", { class: "soft small" }, "Likeliest here"),
        el("tbody", {}, ...others.map(([id, word, value, rank]) => el("tr", {},
          el("td", { class: "number" }, count(rank)),
          el("td", { class: "quoted mono" }, word === null ? `\u27e8${id}\u27e9` : quoted(word)),
          el("td", { class: "number" }, logprob(value)),
          el("td", { class: "number" }, percent(value)))))));
    }
    if (chunk) lines.push(el("div", { class: "soft small" }, `In the ${chunkWords(chunk)}`));
    return lines;
  }

  /* ---------------------------------------------------------------------------------- lives */

  const colours = new Map();
  function colourOf(worker) {
    if (!colours.has(worker)) colours.set(worker, `var(--w${colours.size % 8})`);
    return colours.get(worker);
  }

  function lifeLegend() {
    return el("ul", { class: "legend", "aria-label": "What the bars mean" },
      ...Object.entries(KINDS).filter(([kind]) => kind !== "omitted").map(([kind, words]) => {
        const swatch = el("span", { class: `span ${kind}` });
        swatch.style.cssText = "position:static;display:inline-block;" +
          (MOMENTS.has(kind) ? "height:14px" : "width:1.4rem");
        return el("li", {}, swatch, `${kind}: ${words}`);
      }),
      el("li", {}, "the line on top: which worker"));
  }

  function spanTip(span) {
    const [kind, start, end, worker, first, last, steps, why] = span;
    const lines = [el("div", {}, el("b", {}, kind), worker === null ? "" : ` on ${worker}`)];
    if (!MOMENTS.has(kind)) {
      lines.push(el("div", {}, end === null ? "goes on" : seconds(end - start)));
    }
    const words = spanTokens(span);
    if (words) lines.push(el("div", {}, words));
    if (why) lines.push(el("div", { class: "soft" }, why));
    return lines;
  }

  function spanTokens([kind, , , , first, end, steps]) {
    if (kind === "omitted") return `${many(steps, "entry")}`.replace("entrys", "entries");
    if (kind === "decode") return `${many(end - first, "token")}, up to ${count(end)}`;
    if (kind === "prefill" || BESIDE.has(kind)) {
      return `tokens ${count(first)} to ${count(end - 1)}${steps > 1 ? ` in ${steps} chunks` : ""}`;
    }
    return end ? `${many(end, "token")} so far` : "";
  }

  function bars(spans) {
    const made = [];
    for (const span of spans) {
      const [kind, start, end, worker] = span;
      const bar = el("div", { class: `span ${kind}`, "aria-label": `${kind}${worker === null ? "" : ` on ${worker}`}` });
      bar.style.setProperty("--a", String(start));
      if (end !== null) bar.style.setProperty("--b", String(end));
      bar.tip = () => spanTip(span);
      made.push(bar);
    }
    return made;
  }

  /** The line on top of the bars: a piece for each stay on a worker. */
  function stays(spans) {
    const found = [];
    for (const [kind, start, end, worker] of spans) {
      if (worker === null || MOMENTS.has(kind) || BESIDE.has(kind)) continue;
      const last = found[found.length - 1];
      if (last && last.worker === worker && !last.isOver) last.end = end;
      else found.push({ worker, start, end });
    }
    return found.map(({ worker, start, end }) => {
      const piece = el("div", { class: "span on", "aria-hidden": "true" });
      piece.style.setProperty("--a", String(start));
      if (end !== null) piece.style.setProperty("--b", String(end));
      piece.style.background = colourOf(worker);
      return piece;
    });
  }

  /** Draw a life: its name, which opens what is known of it, and its bars. */
  function life(view, open) {
    const track = list(`Life of ${view.id}`, "track", bars(view.spans));
    track.prepend(...stays(view.spans));
    return el("div", { class: "life" },
      el("button", { type: "button", on: { click: () => open(view.id) }, title: `${view.id}: ${view.state}` },
        el("span", { class: "name mono small" }, view.id),
        el("span", { class: "state" }, view.state)),
      track);
  }

  function spansTable(spans, base, now) {
    return el("div", { class: "scrolls" }, el("table", {},
      el("thead", {}, el("tr", {}, ...["after", "for", "what", "where", "tokens", "why"].map((name, i) =>
        el("th", { scope: "col", class: i < 2 ? "number" : null }, name)))),
      el("tbody", {}, ...spans.map((span) => {
        const [kind, start, end, worker, , , , why] = span;
        const lasts = MOMENTS.has(kind) ? "" : seconds((end === null ? Math.max(now, start) : end) - start);
        return el("tr", {}, el("td", { class: "number" }, seconds(Math.max(0, start - base))),
          el("td", { class: "number" }, lasts), el("td", {}, kind),
          el("td", {}, worker === null ? "" : worker), el("td", {}, spanTokens(span)), el("td", {}, why));
      }))));
  }

  const facts = (pairs) => el("dl", { class: "facts" }, ...pairs.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));

  /** Open a dialog with what is known of something; returns it. */
  function dialog(title, ...children) {
    const close = el("button", { type: "button", on: { click: () => made.close() } }, "Close");
    const made = el("dialog", { "aria-label": title },
      el("div", { class: "bar-of-controls" }, el("h2", { class: "mono" }, title), close), ...children);
    made.addEventListener("close", () => made.remove());
    document.body.append(made);
    made.showModal();
    return made;
  }

  /* -------------------------------------------------------------------------------- workers */

  /** worker: id, device, node, state, running, used, blocks, samples ([[seconds, used blocks]]). */
  function worker(view) {
    const part = view.blocks ? view.used / view.blocks : 0;
    const meter = el("div", { class: "meter", role: "meter", "aria-label": "Blocks in use",
      "aria-valuemin": 0, "aria-valuemax": view.blocks, "aria-valuenow": view.used },
      el("div"));
    meter.style.setProperty("--part", String(part));
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = colourOf(view.id);
    return el("div", { class: "worker" }, el("h3", {}, swatch, view.id),
      el("p", { class: "small soft" }, [view.device, view.node, view.state].filter(Boolean).join(", ")),
      meter,
      el("p", { class: "small" }, `${count(view.used)} of ${many(view.blocks, "block")} in use (${Math.round(part * 100)} %)` +
        (view.running === null ? "" : `, ${many(view.running, "request")}`)),
      usage(view));
  }

  function usage({ samples, blocks }) {
    const made = svg("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img",
      "aria-label": samples.length ? `Blocks in use over time, at most ${Math.max(...samples.map((s) => s[1]))}` : "No samples" });
    if (samples.length > 1) {
      const [start, end] = [samples[0][0], samples[samples.length - 1][0]];
      const x = (time) => ((time - start) / Math.max(end - start, 1e-9)) * 100;
      const y = (used) => 39 - (used / Math.max(blocks, 1)) * 37;
      let path = `M0 40 L0 ${y(samples[0][1]).toFixed(2)}`;
      for (const [time, used] of samples) path += ` H${x(time).toFixed(2)} V${y(used).toFixed(2)}`;
      made.append(svg("path", { d: `${path} L100 40 Z`, class: "used" }));
    }
    made.append(svg("line", { x1: 0, y1: 39.5, x2: 100, y2: 39.5, stroke: "var(--line)" }));
    return made;
  }

  const tiles = (pairs) => pairs.map(([name, value]) => el("li", {}, el("b", {}, String(value)), el("span", {}, name)));

  return { el, count, many, logprob, seconds, tokens, tokenLegend, lifeLegend, life, spansTable, facts, dialog,
    worker, tiles, hideTip, placeTip };
})();
