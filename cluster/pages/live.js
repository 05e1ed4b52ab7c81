"use strict";
/* The live page: a snapshot of the engine, then what changes of it, as server-sent events. */
(() => {
  const { el, count, many, seconds } = pictures;
  const byId = (id) => document.getElementById(id);
  const root = location.pathname.replace(/\/*$/, "/");
  const MAX_SAMPLES = 600;
  const LONGEST_RETRY_S = 15;

  const requests = new Map();
  const workers = new Map();
  const rates = [];
  let state = null; /* counters and such, as the engine told them last */
  let clock = 0; /* the engine's time less this page's */
  let pausedAt = null;
  let opened = null;
  let scored = null;
  let key = sessionStorage.getItem("haversack-key");

  const now = () => (pausedAt === null ? performance.now() / 1000 + clock : pausedAt);
  const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

  /* ---------------------------------------------------------------------------- the connection */

  function say(text, isBad) {
    byId("connection").textContent = text;
    byId("connection").className = isBad ? "bad" : "soft";
  }

  async function follow() {
    for (let failures = 0; ; failures += 1) {
      try {
        const answer = await fetch(`${root}events`, { headers: headers(), cache: "no-store" });
        if (answer.status === 401) {
          await askForKey();
          failures = -1;
          continue;
        }
        if (!answer.ok) throw new Error(`the endpoint answers ${answer.status}`);
        await eachEvent(answer.body, (message) => {
          failures = -1;
          take(message);
        });
        say("The connection ended; connects again", true);
      } catch (error) {
        say(`Not connected: ${error.message}. Tries again`, true);
      }
      const wait = Math.min(2 ** Math.max(failures, 0) * 0.5, LONGEST_RETRY_S);
      await new Promise((done) => setTimeout(done, wait * 1000));
    }
  }

  async function eachEvent(body, call) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data !== "[DONE]") call(JSON.parse(data));
      }
    }
  }

  function askForKey() {
    say("This endpoint wants an API key", true);
    const form = byId("key-form");
    form.hidden = false;
    byId("key").focus();
    return new Promise((done) => {
      form.onsubmit = (event) => {
        event.preventDefault();
        key = byId("key").value.trim();
        sessionStorage.setItem("haversack-key", key);
        form.hidden = true;
        done();
      };
    });
  }

  /* --------------------------------------------------------------------------- what is told */

  function take(message) {
    if (message.trouble !== undefined) {
      say(message.trouble === null ? "Live" : message.trouble, message.trouble !== null);
    }
    if (message.type === "alive") return;
    if (message.type === "snapshot") {
      requests.clear();
      workers.clear();
      rates.length = 0;
    }
    clock = message.now - performance.now() / 1000;
    const before = state;
    state = message;
    for (const told of message.workers) {
      const known = workers.get(told.id) || { samples: [] };
      workers.set(told.id, Object.assign(known, told));
    }
    for (const id of message.gone_workers) workers.delete(id);
    for (const known of workers.values()) {
      known.samples.push([message.now, known.used]);
      if (known.samples.length > MAX_SAMPLES) known.samples.shift();
    }
    const changed = new Set();
    for (const told of message.requests) {
      const known = requests.get(told.id) || { spans: [] };
      const { keep, spans, ...others } = told;
      requests.set(told.id, Object.assign(known, others, { spans: [...known.spans.slice(0, keep), ...spans] }));
      changed.add(told.id);
    }
    for (const id of message.gone) requests.delete(id);
    rates.push([message.now, message.counters.computed_tokens]);
    if (rates.length > 6) rates.shift();
    if (message.type === "snapshot" || before === null) say("Live", false);
    if (pausedAt === null) draw(changed);
    if (scored !== null && changed.has(scored.id)) drawScored();
  }

  const rate = () => {
    const [first, last] = [rates[0], rates[rates.length - 1]];
    return last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : 0;
  };

  /* ---------------------------------------------------------------------------- what is drawn */

  function draw(changed) {
    const { counters } = state;
    byId("model").textContent = state.model;
    document.title = `${state.model} \u2013 Haversack`;
    byId("sums").replaceChildren(...pictures.tiles([
      ["running", count(counters.running)],
      ["waiting", count(counters.waiting)],
      ["tokens in the queue", count(counters.queued_tokens)],
      ["tokens/s", count(Math.max(0, rate()))],
      ["finished", count(counters.finished)],
      ["failed or aborted", count(counters.failed + counters.aborted)],
      ["evictions", count(counters.evictions)],
      ["moves", count(counters.migrations)],
      ["workers lost", count(counters.workers_lost)],
    ]));
    byId("worker-cards").replaceChildren(...[...workers.values()].map((worker) => pictures.worker(worker)));
    drawRequests(changed);
    if (opened !== null && changed.has(opened.id)) fillDialog();
  }

  const stateWords = (view) => {
    if (view.reason !== null) return `${view.reason}${view.worker ? ` on ${view.worker}` : ""}`;
    const place = view.state === "running" ? view.worker : view.worker === null ? view.state : `${view.state} on ${view.worker}`;
    const done = Math.min(view.computed, view.prompt);
    return view.output ? `${place}, ${count(view.output)} out` : `${place}, ${count(done)} of ${count(view.prompt)}`;
  };

  /* In order of service; those that have ended, the latest first. */
  const endOf = (view) => view.spans[view.spans.length - 1][1];
  const inOrder = (a, b) => (a.reason === null ? a.priority - b.priority || a.arrival - b.arrival : endOf(b) - endOf(a));

  const drawn = new Map(); /* id -> its element */

  function drawRequests(changed) {
    const wanted = byId("find").value.trim().toLowerCase();
    const places = { false: [], true: [] };
    for (const [id, view] of requests) {
      view.words = stateWords(view);
      if (wanted && !`${id} ${view.words}`.toLowerCase().includes(wanted)) continue;
      if (view.reason !== null && endOf(view) < now() - Number(byId("window").value)) continue;
      let made = drawn.get(id);
      if (made === undefined || changed.has(id)) {
        const fresh = pictures.life({ id, spans: view.spans, state: view.words }, open);
        if (made !== undefined) keepFocus(made, fresh);
        drawn.set(id, (made = fresh));
      }
      places[view.reason !== null].push([view, made]);
    }
    for (const id of [...drawn.keys()]) if (!requests.has(id)) drawn.delete(id);
    for (const [isOver, box] of [["false", byId("life-rows")], ["true", byId("ended-rows")]]) {
      const rows = places[isOver].sort((a, b) => inOrder(a[0], b[0])).map(([, made]) => made);
      const head = isOver === "false" || rows.length ? [axis()] : [];
      const same = box.children.length === rows.length + head.length && rows.every((made, i) => box.children[i + head.length] === made);
      if (same && head.length) box.children[0].replaceWith(head[0]);
      else box.replaceChildren(...head, ...rows);
    }
    byId("ended-title").hidden = !places.true.length;
    const numLive = [...requests.values()].filter((view) => view.reason === null).length;
    const hidden = state.num_live - numLive;
    byId("hidden-requests").textContent = state.num_live === 0 ? "No request is live." :
      `${many(state.num_live, "live request")}${hidden > 0 ? `; the first ${count(numLive)} in order of service are shown, ${count(hidden)} are hidden` : ""}.`;
    restoreFocus();
    pictures.placeTip();
    tick();
  }

  /* A row that is drawn anew keeps the place of the keyboard. */
  let focusTo = null;
  function keepFocus(old, fresh) {
    const at = [...old.querySelectorAll("button, [data-tip]")].indexOf(document.activeElement);
    if (at >= 0) focusTo = [...fresh.querySelectorAll("button, [data-tip]")][at] || fresh.querySelector("button");
  }
  function restoreFocus() {
    if (focusTo !== null && focusTo.isConnected) focusTo.focus({ preventScroll: true });
    focusTo = null;
  }

  function axis() {
    const width = Number(byId("window").value);
    const marks = [1, 0.75, 0.5, 0.25, 0].map((part) =>
      el("span", {}, part === 0 ? "now" : `\u2212${seconds(part * width).replace(/\.0+ /, " ")}`));
    return el("div", { class: "life axis-row" }, el("span"), el("div", { class: "axis" }, ...marks));
  }

  function tick() {
    const until = now();
    const style = byId("requests").style;
    style.setProperty("--from", (until - Number(byId("window").value)).toFixed(2));
    style.setProperty("--until", until.toFixed(2));
    style.setProperty("--now", until.toFixed(2));
  }

  /* --------------------------------------------------------------------------- one request */

  function open(id) {
    const box = el("div");
    opened = { id, box };
    fillDialog();
    pictures.dialog(id, box).addEventListener("close", () => (opened = null));
  }

  function fillDialog() {
    const view = requests.get(opened.id);
    if (view === undefined) return;
    const pairs = [
      ["state", view.reason === null ? view.state : view.reason],
      ["worker", view.worker === null ? "none" : view.worker],
      ["since submission", seconds(Math.max(0, (view.reason === null ? now() : view.spans[view.spans.length - 1][1]) - view.spans[0][1]))],
      ["prompt tokens", count(view.prompt)],
      ["computed tokens", count(view.computed)],
      ["generated tokens", count(view.output)],
      ["blocks", count(view.blocks)],
      ["priority", view.priority],
      ["evictions", view.evictions],
      ["moves", view.moves],
      ["workers lost", view.losses],
      ["client", view.client],
    ];
    opened.box.replaceChildren(
      view.error === null ? "" : el("p", { class: "bad" }, view.error),
      pictures.facts(pairs),
      pictures.spansTable(view.spans, view.spans[0][1], now()),
    );
  }

  /* --------------------------------------------------------------------------- scoring a text */

  async function score(event) {
    event.preventDefault();
    const said = byId("score-said");
    said.textContent = "is scored";
    byId("score").disabled = true;
    const id = `page-${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
    try {
      const answer = await fetch(`${root}score`, { method: "POST",
        headers: { "content-type": "application/json", ...headers() },
        body: JSON.stringify({ context: "", continuations: [byId("text").value], logprobs: 5, request_id: id }) });
      const body = await answer.json();
      if (!answer.ok) throw new Error(body.error ? body.error.message : `the endpoint answers ${answer.status}`);
      const [entry] = body.data;
      scored = { id: `${id}-0`, entry };
      said.textContent = `logprob ${pictures.logprob(entry.logprob)}, ${many(entry.num_tokens, "token")}, perplexity ${Number(Math.exp(-entry.logprob / Math.max(entry.num_tokens, 1)).toPrecision(5)).toLocaleString("en")}`;
      drawScored();
    } catch (error) {
      said.textContent = error.message;
    } finally {
      byId("score").disabled = false;
    }
  }

  function drawScored() {
    const { id, entry } = scored;
    const view = requests.get(id);
    const row = { ids: entry.token_ids, texts: entry.tokens, logprobs: entry.token_logprobs, ranks: entry.token_ranks,
      tops: entry.top_logprobs.map((tops) => tops.map((top, i) => [null, top.token, top.logprob, i + 1])),
      parts: [{ start: 0, offset: entry.num_context_tokens, spans: view === undefined ? [] : view.spans }] };
    byId("scored").replaceChildren(pictures.tokens(row, "Tokens of the text"));
  }

  /* ------------------------------------------------------------------------------------ start */

  byId("life-legend").append(pictures.lifeLegend());
  byId("token-legend").append(pictures.tokenLegend());
  byId("score-form").addEventListener("submit", score);
  byId("find").addEventListener("input", () => state && drawRequests(new Set()));
  byId("window").addEventListener("change", () => state && drawRequests(new Set()));
  byId("pause").addEventListener("click", () => {
    pausedAt = pausedAt === null ? now() : null;
    byId("pause").setAttribute("aria-pressed", String(pausedAt !== null));
    byId("pause").textContent = pausedAt === null ? "Pause" : "Go on";
    if (pausedAt === null && state) draw(new Set(requests.keys()));
  });
  setInterval(() => state && pausedAt === null && !document.hidden && tick(), 250);
  follow();
})();
