"use strict";

// Server-sent events say when something changed; parts of the page that listen for `changed` then load themselves anew.
(function live() {
  const address = document.body.dataset.live;
  if (!address) return;
  const sign = document.getElementById("live");
  let source = null;
  let waiting = false;
  let missed = false;
  let away = false;

  function show(state, words) {
    sign.className = `live ${state}`;
    if (sign.textContent !== words) sign.textContent = words;
  }
  function changed() {
    // While a policy learns something changes all the time; every two seconds is enough to look at.
    if (waiting) { missed = true; return; }
    waiting = true;
    setTimeout(() => document.body.dispatchEvent(new Event("changed")), 200);
    setTimeout(() => { waiting = false; if (missed) { missed = false; changed(); } }, 2000);
  }
  function back() {
    // What was said of the outage is over with it.
    if (away) for (const note of document.querySelectorAll("#notice [data-away]")) note.remove();
    away = false;
  }
  function open() {
    if (source) return;
    source = new EventSource(address);
    source.addEventListener("changed", (event) => {
      if (event.data) show("off", event.data); else show("on", "live");
      back();
      changed();
    });
    source.addEventListener("away", () => { away = true; show("off", "PostgreSQL away"); });
    source.onerror = () => {
      show("off", "connecting …");
      // The browser tries again by itself, but not after an answer that is no stream, as of an ended login.
      if (source.readyState === EventSource.CLOSED) { source = null; setTimeout(askThenOpen, 5000); }
    };
  }
  async function askThenOpen() {
    const answer = await fetch("/ui/chart", { headers: { "HX-Request": "true" } }).catch(() => null);
    if (answer?.status === 401) location.assign("/ui/login");
    else open();
  }
  function close() { if (source) { source.close(); source = null; } }
  // A hidden page needs no connection: browsers allow six for each server.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
})();

// What a person opened or writes in a part that loads itself anew stays as it was; what they were told stays for a while.
(function keep() {
  const NOTE_MILLISECONDS = 20000;
  const told = new WeakMap();
  let folds = [];
  let notes = [];
  let skipped = false;
  document.body.addEventListener("htmx:beforeSwap", (event) => {
    const target = event.detail.target;
    folds = [...target.querySelectorAll("details[id]")].map((fold) => [fold.id, fold.open]);
    const asked = event.detail.requestConfig.verb === "get";
    notes = !asked ? [] : [...target.querySelectorAll("[data-notes]")].map((place) => [place.id, [...place.children].filter(fresh)]);
    // Nor does the focus of a keyboard leave it; the part is loaded once the focus has gone elsewhere.
    const busy = target.contains(document.activeElement) && document.activeElement.matches("input, textarea, select, :focus-visible");
    // Nor is a part replaced whose button waits for its answer: the answer would find no place.
    const waits = target.querySelector(".htmx-request") !== null;
    if ((busy || waits) && asked) { event.detail.shouldSwap = false; skipped = true; }
  });
  document.body.addEventListener("htmx:afterSwap", () => {
    for (const [id, open] of folds) {
      const fold = document.getElementById(id);
      if (fold) fold.open = open;
    }
    for (const [id, said] of notes) {
      const place = document.getElementById(id);
      if (place && !place.childElementCount) place.append(...said);
    }
    folds = notes = [];
  });
  function catchUp() {
    if (!skipped) return;
    skipped = false;
    setTimeout(() => document.body.dispatchEvent(new Event("changed")), 200);
  }
  document.addEventListener("focusout", catchUp);
  document.body.addEventListener("htmx:afterRequest", (event) => { if (event.detail.requestConfig.verb !== "get") catchUp(); });
  function fresh(note) {
    if (!told.has(note)) told.set(note, Date.now());
    return Date.now() - told.get(note) < NOTE_MILLISECONDS;
  }
})();

document.addEventListener("click", (event) => {
  if (event.target.matches("[data-dismiss]")) event.target.closest(".note").remove();
});
document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.submit();
});

// One measure a panel, all over the same replies.
(function chart() {
  const place = document.getElementById("chart");
  if (!place) return;
  const PANELS = {
    good: { name: "good", title: "Good verdicts, of the newest 20 that are good or bad", unit: "%", percent: true },
    length: { name: "length", title: "Length of replies, mean of the newest 20", unit: "tokens" },
    probes: { name: "right", title: "Probes that the version answers right", unit: "%", percent: true, stepped: true },
    match: { name: "match", title: "Requests of an evaluation that the version answers as wanted", unit: "%", percent: true, stepped: true },
  };
  const HEIGHT = 150;
  let plots = new Map();
  let versions = [];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function mark(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("--trained");
    ctx.setLineDash([4, 4]);
    ctx.textAlign = "left";
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    let free = -Infinity;
    for (const [position, number] of versions) {
      const x = u.valToPos(position, "x", true);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      if (x > free) {
        ctx.fillText(`v${number}`, x + 3, bbox.top - 4 * devicePixelRatio);
        free = x + 34 * devicePixelRatio;
      }
    }
    ctx.restore();
  }
  function named(u, reply) {
    const version = versions.findLast(([first]) => first <= reply);
    return version ? `${reply}, version ${version[1]}` : (reply ?? "–");
  }
  function options({ name, unit, percent, stepped }) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") }, labelSize: 18 };
    const shown = (u, value) => (value === null || value === undefined ? "–" : percent ? `${Math.round(100 * value)} %` : Math.round(value));
    return {
      width: place.clientWidth, height: HEIGHT, padding: [18, 30, 0, 0], legend: { markers: { show: false } },
      cursor: { y: false, sync: { key: "replies" } },
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, percent ? 1.05 : (high || 1) * 1.1] } },
      axes: [
        { ...axis, label: "reply, oldest first", size: 30, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
        { ...axis, label: unit, size: 44, values: (u, ticks) => ticks.map((tick) => (percent ? Math.round(100 * tick) : tick)) },
      ],
      series: [
        { label: "reply", value: named },
        { label: name, stroke: color("--ink"), width: 2, spanGaps: !stepped, value: shown, paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined },
      ],
      hooks: { draw: [mark] },
    };
  }
  function panel(name) {
    const title = document.createElement("h3");
    title.textContent = PANELS[name].title;
    place.append(title);
    return place;
  }
  async function load() {
    const answer = await fetch(place.dataset.chart).catch(() => null);
    if (!answer?.ok) return;
    const drawn = await answer.json();
    if (!drawn.at.length) { place.textContent = "No reply has been recorded yet."; return; }
    if (typeof uPlot === "undefined") { place.textContent = "This browser cannot draw the chart; the table of versions has the figures."; return; }
    versions = drawn.versions.map(([position, number]) => [position + 1, number]);
    const there = Object.keys(PANELS).filter((name) => drawn[name].some((value) => value !== null));
    if (there.join() !== [...plots.keys()].join()) { clear(); place.textContent = ""; }
    const positions = drawn.at.map((_, position) => position + 1);
    for (const name of there) {
      const data = [positions, drawn[name]];
      if (plots.has(name)) plots.get(name).setData(data);
      else plots.set(name, new uPlot(options(PANELS[name]), data, panel(name)));
    }
  }
  function clear() { plots.forEach((plot) => plot.destroy()); plots = new Map(); }
  function again() { clear(); place.textContent = ""; load(); }
  new ResizeObserver(() => plots.forEach((plot) => {
    if (plot.width !== place.clientWidth) plot.setSize({ width: place.clientWidth, height: HEIGHT });
  })).observe(place);
  place.addEventListener("keydown", (event) => {
    const [first] = plots.values();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !first) return;
    event.preventDefault();
    const last = first.data[0].length - 1;
    const at = Math.min(last, Math.max(0, (first.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by * (event.shiftKey ? 10 : 1)));
    first.setCursor({ left: first.valToPos(first.data[0][at], "x"), top: 0 }, true, true);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.body.addEventListener("changed", load);
  load();
})();

// The box that chats. The server sends what an OpenAI client gets; text is only ever set as text.
(function tryIt() {
  const form = document.getElementById("try-form");
  if (!form) return;
  const log = document.getElementById("try-log");
  const say = document.getElementById("say");
  const name = `page-${crypto.getRandomValues(new Uint32Array(4)).join("-").replace(/[^0-9-]/g, "").slice(0, 40)}`;
  const messages = [];

  function bubble(kind, words) {
    const place = document.createElement("div");
    place.className = `bubble ${kind}`;
    const said = document.createElement("div");
    said.className = "said";
    said.dir = "auto";
    said.textContent = words;
    place.append(said);
    log.append(place);
    return said;
  }
  async function* contents(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk.choices?.[0]?.delta?.content ?? "";
      }
    }
  }
  async function send(words) {
    messages.push({ role: "user", content: words });
    bubble("asked", words);
    const place = bubble("reply", "…");
    try {
      const answer = await fetch("/ui/chat", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-CSRF-Token": form.dataset.csrf, "X-Session-ID": name },
        body: JSON.stringify({ model: "policy", stream: true, messages }),
      });
      if (!answer.ok) {
        const problem = await answer.json().catch(() => null);
        throw new Error(problem?.error?.message ?? `The gateway answered with status ${answer.status}.`);
      }
      let reply = "";
      for await (const piece of contents(answer.body)) {
        reply += piece;
        place.textContent = reply;
      }
      messages.push({ role: "assistant", content: reply });
    } catch (error) {
      messages.pop();
      place.textContent = error.message;
      place.parentElement.classList.add("note", "bad");
    }
    look();
  }
  function look() { htmx.ajax("GET", `/ui/chat/${name}`, { target: "#try-recorded", swap: "innerHTML" }); }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = say.value.trim();
    if (!words) return;
    const button = form.querySelector("button");
    button.disabled = true;
    say.value = "";
    await send(words);
    button.disabled = false;
    say.focus();
  });
  say.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
  });
  document.body.addEventListener("changed", () => { if (messages.length) look(); });
})();

// Searches of sessions that a person saved, in this browser alone.
(function searches() {
  const form = document.getElementById("save-search");
  if (!form) return;
  const name = document.getElementById("search-name");
  const saved = JSON.parse(localStorage.getItem("searches") ?? "{}");
  function show() {
    document.getElementById("saved").replaceChildren(...Object.entries(saved).flatMap(([label, query]) => {
      const link = Object.assign(document.createElement("a"), { href: `/ui/sessions?${query}`, textContent: label });
      const remove = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: "✕", ariaLabel: `Remove the search ${label}` });
      remove.addEventListener("click", () => { delete saved[label]; store(); });
      return [link, remove];
    }));
  }
  function store() { localStorage.setItem("searches", JSON.stringify(saved)); show(); }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = [...new FormData(document.querySelector(".filters"))].filter(([, value]) => value);
    saved[name.value.trim()] = new URLSearchParams(fields).toString();
    form.reset();
    store();
  });
  show();
})();
