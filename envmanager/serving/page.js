"use strict";
const TOKEN = new URLSearchParams(location.search).get("token") || "";
const EVERY_MS = 1000, LONGEST_MS = 60000, SHORTEST_MS = 10000;
const DOINGS = [  // in the order in which a span has them, from its fourth number on
  ["step", "step"], ["reset", "reset, call"], ["idle", "idle"], ["core", "waiting for a core"],
  ["restart", "failed, restarting"],
];
const LINES = ["step", "core", "reset", "restart"];
const TIMES = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 720, 1440, 2880, 7200].map(n => 60 * n)];
// Behaviors and figures may be called anything, such as "constructor": objects with these keys have no prototype.
const plain = (...parts) => Object.assign(Object.create(null), ...parts);
const bare = (_, value) => value && typeof value === "object" && !Array.isArray(value) ? plain(value) : value;
const $ = id => document.getElementById(id);
let after = 0, spans = [], events = [], last = null, isOff = false;

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
const make = (tag, text = "", parent = null) => {
  const made = document.createElement(tag);
  made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const number = value => value == null ? "–" : Math.abs(value) >= 1000 || Number.isInteger(value)
  ? Math.round(value).toLocaleString("en")
  : Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
const bytes = n => n >= 2 ** 30 ? `${number(n / 2 ** 30)} GiB` : `${number(n / 2 ** 20)} MiB`;
const seconds = s => s >= 1 ? `${number(s)} s` : s >= 1e-3 ? `${number(s * 1e3)} ms` : `${number(s * 1e6)} µs`;
const clock = s => [s / 3600, s / 60 % 60, s % 60].map(n => String(Math.floor(n)).padStart(2, "0")).join(":");

function canvas(id, height) {
  const element = $(id), ratio = devicePixelRatio || 1, width = element.parentElement.clientWidth;
  element.style.height = `${height}px`;
  element.width = width * ratio;
  element.height = height * ratio;
  const context = element.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("dim");
  return [context, width];
}

function drawTimeline() {
  const workers = last.workers, row = Math.max(6, Math.min(22, Math.floor(480 / workers.length)));
  const left = 30, bottom = 18, gap = row > 8 ? 3 : 1, every = Math.ceil(13 / row);
  const shown = Math.max(SHORTEST_MS, Math.min(LONGEST_MS, last.now));
  const [context, whole] = canvas("timeline", workers.length * row + bottom);
  const isWide = whole > 600, width = whole - (isWide ? 130 : 52);
  const colours = Object.fromEntries([...DOINGS.map(([name]) => name), "failed"].map(name => [name, colour(name)]));
  const x = ms => Math.round(left + (width - left) * Math.max(0, 1 - (last.now - ms) / shown));
  const box = (worker, began, ended, name, from, to) => {  // from, to: shares of the height, from below
    context.fillStyle = colours[name];
    const height = row - gap, x0 = x(began), y = worker * row + height * (1 - to);
    context.fillRect(x0, y, x(ended) - x0, height * (to - from));
  };
  context.textBaseline = "middle";
  workers.forEach((worker, at) => {
    if (at % every) return;
    const y = Math.max(6, at * row + (row - gap) / 2), idle = Math.round(worker.idle * 100);
    context.fillText(worker.id, 0, y);
    context.fillText(seconds(worker.median) + (isWide ? `, ${idle} % idle` : ""), width + 8, y);
  });
  for (const [worker, began, ended, ...times] of spans) {
    if (ended < last.now - shown) continue;
    const total = times.reduce((sum, ms) => sum + ms, 0) || 1;
    let from = 0;
    for (const k of [0, 1, 3, 4, 2]) {  // idle on top
      if (times[k]) box(worker, began, ended, DOINGS[k][0], from, from += times[k] / total);
    }
  }
  context.globalAlpha = 0.55;  // what is not over yet
  workers.forEach((worker, at) => { if (worker.since > 0) box(at, worker.since, last.now, worker.state, 0, 1); });
  context.globalAlpha = 1;
  context.fillStyle = colour("text");
  for (const { worker, ms, kind } of events) {
    if (worker >= 0 && kind !== "TaskLost" && ms > last.now - shown) {
      context.fillRect(x(ms), worker * row - 1, 1, row - gap + 2);
    }
  }
  context.fillStyle = colour("dim");
  for (const share of [0, 0.5, 1]) {
    context.textAlign = ["right", "center", "left"][share * 2];
    const ago = share ? `${number(Math.round(shown * share / 100) / 10)} s ago` : "now";
    context.fillText(ago, x(last.now - shown * share), workers.length * row + 9);
  }
  $("timeline").onpointermove = $("timeline").onpointerdown = event => {
    const worker = workers[Math.floor(event.offsetY / row)];
    if (worker) $("under").textContent = `worker ${worker.id} (env ${worker.envs.join(", ")}): ${worker.state}, ` +
      `${number(worker.steps)} steps, median ${seconds(worker.median)}, idle ${number(worker.idle * 100)} %, ` +
      `${worker.restarts} restarts` + (worker.memory ? `, ${bytes(worker.memory)} of memory` : "");
  };
}

const plots = {};
function drawPlot(id, lines) {  // lines: name → [[seconds, value], …]
  const names = Object.keys(lines), width = $(id).clientWidth;
  if (!names.length || !width) return;
  const data = uPlot.join(Object.values(lines).map(own => [own.map(p => p[0]), own.map(p => p[1])]));
  const key = names.join("\n");
  if (plots[id]?.key === key) {
    if (plots[id].width !== width) plots[id].setSize({ width, height: 170 });
    return plots[id].setData(data);
  }
  plots[id]?.destroy();
  $(id).textContent = "";
  const axis = { stroke: () => colour("dim"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
  plots[id] = new uPlot({
    width, height: 170,
    scales: { x: { time: false }, y: id === "rate" ? { range: (_, low, high) => [0, high * 1.05 || 1] } : {} },
    axes: [
      { ...axis, size: 28, incrs: TIMES, space: 70, values: (_, at) => at.map(clock) },
      { ...axis, size: 60, space: 25, values: (_, at) => at.map(number) },
    ],
    series: [
      { label: "after", value: (_, s) => s == null ? "–" : clock(s) },
      ...names.map((label, at) => ({
        label, width: 1.5, spanGaps: true, stroke: () => colour(LINES[at % LINES.length]),
        value: (_, value) => number(value),
      })),
    ],
  }, data, $(id));
  plots[id].key = key;
}

function drawPlots() {
  const rate = [], returns = plain(), counted = plain();
  last.history.forEach(([s, steps, progress], at) => {
    const [before, stepsBefore] = at ? last.history[at - 1] : [0, 0];
    if (at && s > before) rate.push([s, (steps - stepsBefore) / (s - before)]);
    for (const [behavior, [n, total]] of Object.entries(progress)) {
      const [nBefore, totalBefore] = counted[behavior] || [0, 0];
      if (n > nBefore) (returns[behavior] ||= []).push([s, (total - totalBefore) / (n - nBefore)]);
      counted[behavior] = [n, total];
    }
  });
  drawPlot("rate", rate.length ? { "steps/s": rate } : {});
  drawPlot("return", returns);
}

function show() {
  const { means, tasks, figures, facts } = last, names = Object.keys(means);
  $("about").textContent = `${last.workers.reduce((n, w) => n + w.envs.length, 0)} environments in ` +
    `${last.workers.length} workers, watched for ${clock(last.now / 1000)}`;
  const tiles = plain({ "env steps/s": number(last.steps_per_s), "env steps": number(last.env_steps) });
  tiles.episodes = number(last.episodes);
  for (const name of names) {
    const { return: mean, length, ...measures } = means[name], whose = names.length > 1 ? `, ${name}` : "";
    tiles[whose ? `return${whose}` : "mean return"] = number(mean);
    for (const each of Object.keys(measures)) tiles[each + whose] = number(measures[each]);
  }
  if (tasks) tiles["tasks done"] = number(tasks.done) + (tasks.total == null ? "" : ` of ${number(tasks.total)}`);
  if (tasks && tasks.lost) tiles["tasks given up"] = number(tasks.lost);
  tiles.restarts = number(last.restarts);
  tiles["episodes lost"] = number(last.episodes_lost);
  if (last.episodes_kept) tiles["episodes kept"] = number(last.episodes_kept);
  const memory = last.workers.reduce((n, worker) => n + worker.memory, 0);
  if (memory) tiles["memory of workers"] = bytes(memory);
  $("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
    const tile = make("div");
    make("b", value, tile);
    make("span", name, tile);
    return tile;
  }));
  $("facts").textContent = Object.entries(facts).map(each => each.join(": ")).join("\u2003");
  $("verdict").textContent = last.verdict;
  $("learning").hidden = !Object.keys(figures).length;
  const known = [...new Set(Object.values(figures).flatMap(Object.keys))];
  const rows = known.map(name => [name.replaceAll("_", " "), ...Object.values(figures).map(own => number(own[name]))]);
  $("figures").replaceChildren(...[["behavior", ...Object.keys(figures)], ...rows].map((cells, at) => {
    const row = make("tr");
    cells.forEach(cell => make(at ? "td" : "th", cell, row));
    return row;
  }));
  drawTimeline();
  drawPlots();
}

function addEvents(more) {
  for (const event of more) {
    const item = make("li"), [headline, ...rest] = event.text.split("\n");
    const outer = rest.length ? make("details", "", item) : item;
    const line = make(rest.length ? "summary" : "span", "", outer);
    make("time", clock(Math.max(0, event.ms / 1000)), line);
    make("b", `${event.kind} `, line);
    line.append(headline);
    if (rest.length) make("pre", rest.join("\n"), outer);
    $("events").prepend(item);
  }
  while ($("events").children.length > 200) $("events").lastChild.remove();
  events = [...events, ...more].slice(-200);
  $("nothing").hidden = events.length > 0;
}

async function update() {
  if (document.hidden && last) return;
  try {
    const headers = { Authorization: `Bearer ${TOKEN}` };
    const answer = await fetch(`data?after=${after}`, { headers, signal: AbortSignal.timeout(8000) });
    if (!answer.ok) throw new Error(await answer.text());
    last = JSON.parse(await answer.text(), bare);
    after = last.number;
    spans = [...spans.filter(span => span[2] > last.now - LONGEST_MS), ...last.spans];
    addEvents(last.events);
    isOff = false;
    show();
    $("state").textContent = "live";
  } catch (error) {
    if (!isOff) $("state").textContent = `no answer since ${new Date().toLocaleTimeString()}: the run has ended?`;
    isOff = true;
  }
  $("state").classList.toggle("off", isOff);
}

for (const [name, text] of DOINGS) {
  const item = make("span", "", $("legend"));
  make("i", "", item).style.background = `var(--${name})`;
  item.append(text);
}
addEventListener("resize", () => last && show());
document.addEventListener("visibilitychange", update);
(async () => { for (;;) { await update(); await new Promise(resolve => setTimeout(resolve, EVERY_MS)); } })();
