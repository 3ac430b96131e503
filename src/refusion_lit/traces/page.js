
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const count = data.rounds.length;
  const NAMES = { d: "drafted", r: "rejected", a: "accepted" };
  // Colour ramps from viridis: saturated throughout, and ordered for all common kinds of colour blindness. The light page
  // leaves out its brightest part and the dark page its darkest, which would not stand out from the background.
  // The same colours are in the style of #ramp.
  const LIGHT = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81]];
  const DARK = [[42, 120, 142], [31, 152, 139], [68, 191, 112], [155, 217, 60], [253, 231, 37]];
  let now = 0, timer = null, focused = 0;

  function colour(forward, stops) {
    const at = count < 2 ? 0 : (forward - 1) / (count - 1) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * part));
  }
  function paint(element, forward) {
    for (const [name, stops] of [["light", LIGHT], ["dark", DARK]]) setColours(element, name, colour(forward, stops));
  }
  function setColours(element, name, rgb) {
    const linear = rgb.map((v) => (v / 255 <= 0.04045 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    element.style.setProperty(`--${name}`, `rgb(${rgb})`);
    element.style.setProperty(`--on-${name}`, light > 0.179 ? "#000" : "#fff");
  }
  const percent = (p) => (p === null ? "unknown" : `${(100 * p).toFixed(p > 0.9995 ? 2 : 1)} %`);
  const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

  const explanations = Object.fromEntries(data.phases.map(([phase, , text]) => [phase, text]));
  const groups = [], ends = [];
  const cells = Array.from({ length: data.canvas_length }, (_, index) => {
    const cell = document.createElement("span");
    cell.tabIndex = index === 0 ? 0 : -1;
    cell.setAttribute("role", "img");
    cell.dataset.index = index;
    ends[index] = document.createElement("br"); // shown after a token that ends a line
    cell.append(document.createElement("span"));
    if (index % data.slot_size === 0) {
      groups.push(document.createElement("span"));
      get("text").append(groups.at(-1));
    }
    groups.at(-1).append(cell);
    const isLast = (index + 1) % data.slot_size === 0;
    (isLast ? get("text") : groups.at(-1)).append(ends[index]);
    return cell;
  });
  let shown = [];

  function stateAfter(forwards) {
    const states = new Array(data.canvas_length).fill(null);
    for (let r = 0; r < forwards; r += 1)
      for (const [index, piece, probability, status, drafts] of data.rounds[r].changes)
        states[index] = { text: data.pieces[piece], probability, status, drafts, forward: r + 1 };
    return states;
  }
  function describe(index) {
    const state = shown[index];
    const head = `token ${index + 1}, slot ${Math.floor(index / data.slot_size) + 1}: `;
    if (!state) return `${head}masked`;
    const again = state.drafts > 1 ? `, drafted ${state.drafts} times` : "";
    const beyond = index >= data.num_tokens ? ", after the end of the response" : "";
    return `${head}“${state.text}” ${NAMES[state.status]} by forward ${state.forward}, probability ${percent(state.probability)}${again}${beyond}`;
  }
  function draw(index) {
    const cell = cells[index], state = shown[index];
    const names = ["token", state ? NAMES[state.status] : "masked"];
    if (index % data.slot_size === 0 && data.slot_size > 1) names.push("slot");
    if (state && state.status === "a" && state.forward === now) names.push("new");
    if (state && state.status !== "a" && state.drafts > 1) names.push("again");
    if (index >= data.num_tokens) names.push("beyond");
    cell.className = names.join(" ");
    cell.firstChild.textContent = state ? state.text : "·";
    ends[index].hidden = !(state && state.text.endsWith("↵"));
    cell.dataset.forward = state && state.status === "a" ? state.forward : "";
    cell.dataset.drafts = state ? state.drafts : "";
    if (state && state.status === "a") paint(cell, state.forward);
    const text = describe(index);
    cell.setAttribute("aria-label", text);
    cell.title = text;
  }
  function show(forwards) {
    now = Math.max(0, Math.min(count, forwards));
    shown = stateAfter(now);
    cells.forEach((_, index) => draw(index));
    for (const group of groups)
      group.className = group.querySelector("br:not([hidden])") ? "group broken" : "group";
    const tally = { a: 0, d: 0, r: 0, p: 0, n: 0 };
    for (const state of shown) {
      if (!state) continue;
      tally[state.status] += 1;
      if (state.status === "a" && state.forward === now) tally.n += 1;
      if (state.status !== "a" && state.drafts > 1) tally.p += 1;
    }
    const entry = now ? data.rounds[now - 1] : null;
    const scores = entry && entry.num_scores ? `; ${many(entry.num_scores, "token")} verified, lowest ${percent(entry.lowest_score)}` : "";
    const head = entry ? `Forward ${now} of ${count}, ${entry.phase} (${entry.shape.join(" × ")} tokens)${scores}` : `Before the first of ${many(count, "forward")}`;
    get("status").textContent = `${head}. ${many(tally.a, "token")} accepted (${tally.n} now), ${tally.d} drafted, ${tally.r} rejected, ${tally.p} re-planned.`;
    const explanation = entry ? explanations[entry.phase] : "Every token of the response is masked.";
    get("phase").textContent = entry && explanation ? `This forward ${explanation}.` : explanation;
    const slider = get("slider");
    slider.value = now;
    slider.setAttribute("aria-valuetext", entry ? `forward ${now}, ${entry.phase}` : "before the first forward");
    paint(get("legend-new"), Math.max(now, 1));
    if (document.activeElement && document.activeElement.dataset.index) get("detail").textContent = describe(focused);
  }
  function play(on) {
    clearInterval(timer);
    timer = null;
    if (on) {
      if (now >= count) show(0);
      timer = setInterval(() => { show(now + 1); if (now >= count) play(false); }, 600);
    }
    get("play").textContent = on ? "❚❚" : "▶";
    get("play").setAttribute("aria-pressed", String(on));
    get("play").setAttribute("aria-label", on ? "Pause (space)" : "Play (space)");
  }
  function step(to) { play(false); show(to); }
  function focus(index) {
    cells[focused].tabIndex = -1;
    focused = Math.max(0, Math.min(cells.length - 1, index));
    cells[focused].tabIndex = 0;
    cells[focused].focus();
  }

  get("slider").max = count;
  get("slider").addEventListener("input", (event) => step(Number(event.target.value)));
  get("first").addEventListener("click", () => step(0));
  get("back").addEventListener("click", () => step(now - 1));
  get("next").addEventListener("click", () => step(now + 1));
  get("last").addEventListener("click", () => step(count));
  get("play").addEventListener("click", () => play(timer === null));
  for (const name of ["mouseover", "focusin"])
    get("text").addEventListener(name, (event) => {
      const cell = event.target.closest(".token");
      if (!cell) return;
      const index = cell.dataset.index;
      if (name === "focusin") focused = Number(index);
      get("detail").textContent = describe(Number(index));
    });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const tokens = cells.length && event.shiftKey;
    const keys = {
      ArrowRight: () => (tokens ? focus(focused + 1) : step(now + 1)),
      ArrowLeft: () => (tokens ? focus(focused - 1) : step(now - 1)),
      Home: () => (tokens ? focus(0) : step(0)),
      End: () => (tokens ? focus(cells.length - 1) : step(count)),
      " ": () => play(timer === null),
    };
    // The space bar activates a focused button, as on any page.
    if (!keys[event.key] || (event.key === " " && event.target.tagName === "BUTTON")) return;
    event.preventDefault();
    keys[event.key]();
  });

  get("summary").textContent = `${data.decoder}: ${many(Number(data.statistics.tokens), "token")} in ${many(count, "forward")} (${data.statistics["tokens per forward"]} tokens/forward), ${data.seconds} s, ended by ${data.finish_reason}`;
  get("prompt").textContent = data.prompt;
  get("response").textContent = data.response;
  get("scale-end").textContent = `forward ${count}`;
  paint(get("legend-old"), 1);
  function row(table, name, ...values) {
    const line = get(table).insertRow(), head = document.createElement("th");
    head.scope = "row";
    head.textContent = name;
    line.append(head);
    for (const value of values) line.insertCell().textContent = value;
  }
  for (const [name, value] of Object.entries(data.statistics)) row("statistics", name, value);
  for (const [phase, number, text] of data.phases) row("phases", phase, text, number);
  show(count); // the whole text, with the order in which it was decoded
})();
