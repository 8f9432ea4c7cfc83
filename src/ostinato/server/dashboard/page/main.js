// The page: polls the server each second, keeps ten minutes of samples, and hands them to the parts.
//
// While the page is hidden it does not poll; the server remembers what it misses.

import { call } from "/dashboard/api.js";
import { showBuckets } from "/dashboard/buckets.js";
import { Chat } from "/dashboard/chat.js";
import { Cursor, TimeChart } from "/dashboard/chart.js";
import { HeatMap } from "/dashboard/heatmap.js";
import { amount, duration, percent, span, things } from "/dashboard/scale.js";

const KEPT_SECONDS = 620;
const byId = (id) => document.getElementById(id);

const CHARTS = [
  {
    id: "output",
    title: "Tokens generated per second",
    format: amount,
    least: 10,
    series: [{ label: "generated", value: (s) => s.output_tokens }],
  },
  {
    id: "ttft",
    title: "Time to first token",
    format: duration,
    least: 0.001,
    lines: true,
    series: [
      { label: "median", value: (s) => s.ttft?.p50 ?? null },
      { label: "p90", value: (s) => s.ttft?.p90 ?? null },
    ],
  },
  {
    id: "requests",
    title: "Requests",
    format: amount,
    least: 4,
    series: [
      { label: "running", value: (s) => s.running },
      { label: "waiting", value: (s) => s.waiting },
    ],
  },
  {
    id: "prompt",
    title: "Prompt tokens per second",
    format: amount,
    least: 10,
    series: [
      { label: "computed", value: (s) => s.prefill_tokens },
      { label: "cached", value: (s) => s.cached_tokens },
    ],
  },
  {
    id: "itl",
    title: "Time between tokens",
    format: duration,
    least: 0.001,
    lines: true,
    series: [
      { label: "median", value: (s) => s.itl?.p50 ?? null },
      { label: "p90", value: (s) => s.itl?.p90 ?? null },
    ],
  },
  {
    id: "kv",
    title: "KV pages",
    format: percent,
    top: 1,
    series: [
      { label: "in use", value: (s) => s.kv_used },
      { label: "kept as prefixes", value: (s) => s.kv_cached },
    ],
  },
];

const cursor = new Cursor();
const charts = CHARTS.map((spec) => new TimeChart(byId("charts"), spec, cursor));
const heat = new HeatMap(byId("heat"), byId("heat-key"), byId("heat-readout"));
const chat = new Chat();
let samples = [];
let latest = null;

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

// ---- drawing ----

function drawCharts() {
  if (!latest) return;
  const end = samples.length ? samples[samples.length - 1].time : latest.now;
  for (const chart of charts) chart.update(samples, end - Number(chosen("span")), end);
}

function drawLoad() {
  const load = latest?.expert_load;
  byId("experts").hidden = !load;
  if (load) heat.update(chosen("load") === "total" ? load.total : load.recent);
}

function showFacts({ about, totals, now }) {
  byId("model").textContent = about.model;
  document.title = `${about.model} – ostinato`;
  if (!about.layers) return byId("facts").replaceChildren(); // the engine is still being loaded
  const shape = [about.family, things(about.layers, "layer"), about.experts ? things(about.experts, "expert") : "dense", about.dtype];
  const facts = [
    ["model", shape.join(", ")],
    ["steps", `${about.backend}, ${about.ops}, ${things(about.threads, "thread")}`],
    ["up", span(now - about.started)],
  ];
  if (totals) {
    const finished = Object.values(totals.finished).reduce((sum, n) => sum + n, 0);
    const read = totals.prompt_tokens;
    facts.push(["generated", things(totals.output_tokens, "token")], ["finished", things(finished, "answer")]);
    if (read) facts.push(["prompts from cache", percent(Math.min(1, totals.cached_tokens / read))]);
  }
  byId("facts").replaceChildren(
    ...facts.map(([name, text]) => {
      const pair = document.createElement("div");
      pair.append(document.createElement("dt"), document.createElement("dd"));
      pair.firstChild.textContent = name;
      pair.lastChild.textContent = text;
      return pair;
    }),
  );
}

function showState(state, text = state) {
  const shown = byId("state");
  if (shown.textContent !== text) shown.textContent = text; // unchanged text must not be read out again
  shown.dataset.state = state;
}

function take(data) {
  const last = samples.length ? samples[samples.length - 1].number : 0;
  // Another server, or an older one's numbers: what is here belongs to the past of something else.
  if (latest && (latest.about.started !== data.about.started || (data.samples[0]?.number ?? last + 1) <= last)) samples = [];
  const oldest = data.now - KEPT_SECONDS;
  samples = [...samples, ...data.samples].filter((sample) => sample.time >= oldest);
  latest = data;
  showState(data.state);
  showFacts(data);
  chat.configure(data.about);
  drawCharts();
  drawLoad();
  showBuckets(data.buckets, data.graphs);
}

// ---- polling ----

async function poll() {
  if (!document.hidden) {
    try {
      const after = samples.length ? samples[samples.length - 1].number : 0;
      const response = await call(`/dashboard/data?after=${after}`, { signal: AbortSignal.timeout(10_000) });
      take(await response.json());
    } catch (error) {
      showState("lost", error.status ? error.message : "no answer");
    }
  }
  setTimeout(poll, 1000);
}

// ---- theme ----

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("ostinato-theme", theme);
  const name = theme[0].toUpperCase() + theme.slice(1);
  byId("theme").textContent = name;
  byId("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
  drawLoad();
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawLoad);
byId("span").addEventListener("change", drawCharts);
byId("load-span").addEventListener("change", drawLoad);

const stored = localStorage.getItem("ostinato-theme");
setTheme(THEMES.includes(stored) ? stored : "auto");
poll();
