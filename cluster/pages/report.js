"use strict";
/* The report of a batch: its data stands in the page as JSON, a block for each row. */
(() => {
  const { el, count, many, logprob, seconds } = pictures;
  const ROWS_PER_PAGE = 20;
  const MAX_TOKENS = 2000; /* of a row, until one asks for all */
  const byId = (id) => document.getElementById(id);
  const parsed = (node) => JSON.parse(node.textContent);
  const sum = parsed(byId("sum"));
  const nodes = [...document.querySelectorAll("script.row-data")];
  const heads = nodes.map((node, place) => {
    const [index, id, value, num] = JSON.parse(node.dataset.head);
    return { place, index, id, mean: num ? (value === null ? -Infinity : value / num) : 0, num };
  });
  let first = 0;
  let found = heads;

  const nameOf = (row) => (row.id === null ? `row ${row.index}` : `row ${row.index}, ${row.id}`);
  const perplexity = (value, num) =>
    (value === null ? "\u221e" : Number(Math.exp(-value / num).toPrecision(5)).toLocaleString("en"));

  function about() {
    byId("about").textContent = `Scored by ${sum.model}, ${sum.made}. ${many(sum.num_rows, "row")} of ${sum.source}.`;
    const pairs = [["rows", count(sum.num_rows)], ["bad rows", count(sum.num_failed)],
      ["tokens scored", count(sum.num_tokens)],
      ["sum of logprobs", sum.logprob === null ? "\u2212\u221e" : sum.logprob.toFixed(2).replace("-", "\u2212")]];
    if (sum.num_tokens) pairs.push(["perplexity", perplexity(sum.logprob, sum.num_tokens)]);
    if (sum.elapsed_s) pairs.push(["this run", seconds(sum.elapsed_s)], ["tokens/s", count(sum.tokens_per_s)]);
    byId("sums").replaceChildren(...pictures.tiles(pairs));
    const left = sum.num_rows - heads.length;
    byId("hidden-rows").textContent = left
      ? `The first ${count(heads.length)} rows that were written are in this page; ${count(left)} are left out, so that it opens. They are in ${sum.output}.`
      : `All ${many(heads.length, "row")} are in this page.`;
  }

  const texts = new Map();
  function textOf(place) {
    if (!texts.has(place)) {
      const row = parsed(nodes[place]);
      texts.set(place, `${row.id === null ? "" : row.id} ${(row.texts || []).join("")}`.toLowerCase());
    }
    return texts.get(place);
  }

  function choose() {
    const order = byId("order").value;
    const wanted = byId("find").value.trim().toLowerCase();
    found = wanted
      ? heads.filter((head) => String(head.index) === wanted || textOf(head.place).includes(wanted))
      : [...heads];
    const by = { index: (a, b) => a.index - b.index, mean: (a, b) => a.mean - b.mean || a.index - b.index,
      tokens: (a, b) => b.num - a.num || a.index - b.index }[order];
    found.sort(by);
    first = 0;
    show();
  }

  function show() {
    pictures.hideTip();
    const shown = found.slice(first, first + ROWS_PER_PAGE).map((head) => parsed(nodes[head.place]));
    byId("rows").replaceChildren(...shown.map(rowOf));
    byId("place").textContent = found.length
      ? `${count(first + 1)} to ${count(first + shown.length)} of ${count(found.length)}` : "no such row";
    byId("before").disabled = first === 0;
    byId("after").disabled = first + ROWS_PER_PAGE >= found.length;
    showLives(shown);
  }

  function rowOf(row) {
    const head = el("div", { class: "row-head" }, el("h3", {}, nameOf(row)));
    if (row.error) {
      head.append(el("span", { class: "bad" }, `${row.error.type}: ${row.error.message}`));
      return el("div", { class: "row" }, head);
    }
    head.append(el("span", {}, `logprob ${logprob(row.logprob)}`), el("span", { class: "soft" }, many(row.num, "token")));
    if (row.num) head.append(el("span", { class: "soft" }, `perplexity ${perplexity(row.logprob, row.num)}`));
    if (row.greedy && row.num) head.append(el("span", { class: "good" }, "what greedy decoding gives"));
    if (row.ids === null) {
      const why = row.why === "long" ? "It is too long to be shown here." :
        "An earlier run scored it, and the output does not tell its tokens (--echo-tokens would).";
      return el("div", { class: "row" }, head, el("p", { class: "soft small" }, why));
    }
    if (row.context) head.append(el("span", { class: "soft" }, `after ${many(row.context, "token")} of context`));
    const label = `Tokens of ${nameOf(row)}`;
    const box = el("div", { class: "row" }, head, pictures.tokens({ ...row, ids: row.ids.slice(0, MAX_TOKENS) }, label));
    if (row.ids.length > MAX_TOKENS) {
      const all = el("button", { type: "button" }, `Show all ${many(row.ids.length, "token")}`);
      all.addEventListener("click", () => box.replaceChildren(head, pictures.tokens(row, label)));
      box.append(all);
    }
    return box;
  }

  function showLives(rows) {
    const views = [];
    for (const row of rows) {
      (row.parts || []).forEach((part, i) => {
        if (part.spans.length) {
          const id = nameOf(row) + (row.parts.length > 1 ? `, window ${i}` : "");
          views.push({ id, spans: part.spans, state: lifeWords(part.spans) });
        }
      });
    }
    const unknown = rows.filter((row) => !row.error && !(row.parts || []).some((part) => part.spans.length)).length;
    byId("hidden-lives").textContent = unknown ? `Of ${many(unknown, "row")} no life is known: an earlier run scored ${unknown === 1 ? "it" : "them"}.` : "";
    const box = byId("life-rows");
    box.replaceChildren();
    if (!views.length) return;
    const from = Math.min(...views.map((view) => view.spans[0][1]));
    const until = Math.max(...views.flatMap((view) => view.spans.map((span) => (span[2] === null ? span[1] : span[2]))), from + 1e-3);
    box.style.setProperty("--from", String(from));
    box.style.setProperty("--until", String(until));
    box.style.setProperty("--now", String(until));
    const axis = el("div", { class: "axis" }, ...[0, 0.25, 0.5, 0.75, 1].map((part) =>
      el("span", {}, seconds(from - sum.start_s + part * (until - from)))));
    box.append(el("div", { class: "life axis-row" }, el("span"), axis),
      ...views.map((view) => pictures.life(view, () => openLife(view))));
  }

  const lifeWords = (spans) => {
    const workers = [...new Set(spans.map((span) => span[3]).filter((worker) => worker !== null))];
    const chunks = spans.filter((span) => span[0] === "prefill").reduce((all, span) => all + span[6], 0);
    const moved = spans.filter((span) => span[0] === "moved" || span[0] === "resumed").length;
    return workers.length === 0 ? "from the row cache" :
      `${many(chunks, "chunk")} on ${workers.join(", ")}${moved ? `, back or moved ${moved}\u00d7` : ""}`;
  };

  function openLife(view) {
    const start = view.spans[0][1];
    pictures.dialog(view.id, pictures.spansTable(view.spans, start, start));
  }

  byId("token-legend").append(pictures.tokenLegend());
  byId("life-legend").append(pictures.lifeLegend());
  about();
  byId("worker-cards").replaceChildren(...sum.workers.map((worker) => pictures.worker(worker)));
  for (const [id, what] of [["order", "change"], ["find", "input"]]) byId(id).addEventListener(what, choose);
  byId("borders").addEventListener("change", () => byId("rows").classList.toggle("borders", byId("borders").checked));
  for (const [id, step] of [["before", -ROWS_PER_PAGE], ["after", ROWS_PER_PAGE]]) {
    byId(id).addEventListener("click", () => {
      first += step;
      show();
      byId("tokens-title").scrollIntoView();
    });
  }
  choose();
})();
