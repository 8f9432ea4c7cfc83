// A line chart over time, in SVG: axes, one or two series, a legend that reads out the latest value or the one under
// the cursor. Charts share one cursor, so that a moment is read off all of them. Knows nothing of what it shows.
//
// Long windows show the mean of a few samples as one point. A series whose value is null has a gap there; a value with
// gaps on both sides is drawn as a dot.

import { clock, timeTicks, valueTicks } from "/dashboard/scale.js";

const LEFT = 54;
const RIGHT = 8;
const TOP = 6;
const BOTTOM = 20;
const LONGEST_STEP = 4; // seconds between two samples that a line may bridge
const POINTS = 120; // of a line, about

/** The moment all charts point at (Unix seconds), or null. */
export class Cursor extends EventTarget {
  time = null;
  set(time) {
    if (time === this.time) return;
    this.time = time;
    this.dispatchEvent(new Event("move"));
  }
}

/** Means of every `size` samples, as { time, values }; a group stays the same group while the window moves on. */
function points(samples, series, size) {
  const groups = new Map();
  for (const sample of samples) {
    const group = Math.floor(sample.number / size);
    groups.set(group, [...(groups.get(group) ?? []), sample]);
  }
  const mean = (numbers) => (numbers.length ? numbers.reduce((sum, n) => sum + n, 0) / numbers.length : null);
  return [...groups.values()].map((group) => ({
    time: mean(group.map((sample) => sample.time)),
    values: series.map(({ value }) => mean(group.map(value).filter((n) => n !== null))),
  }));
}

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export class TimeChart {
  /**
   * spec: { id, title, format(value), least (smallest top of the axis), top (fixed top), lines (no area),
   *         series: [{ label, value(sample) -> number | null }] }
   */
  constructor(host, spec, cursor) {
    this.spec = spec;
    this.cursor = cursor;
    this.points = [];
    this.latest = null;
    this.window = [0, 1];
    this.card = document.createElement("article");
    this.card.className = "card";
    this.card.id = `chart-${spec.id}`;
    this.card.innerHTML =
      '<div class="card-head"><h2></h2><span class="chart-time"></span></div><div class="legend"></div>';
    this.card.querySelector("h2").textContent = spec.title;
    this.time = this.card.querySelector(".chart-time");
    this.values = spec.series.map((series, index) => this.#legendEntry(series, index));
    this.svg = svg("svg", { class: "chart", role: "img", tabindex: "0" });
    this.card.append(this.svg);
    host.append(this.card);
    this.#listen();
  }

  #legendEntry(series, index) {
    const entry = document.createElement("span");
    entry.innerHTML = `<i class="series-${index}"></i><span></span><b>–</b>`;
    entry.querySelector("span").textContent = series.label;
    this.card.querySelector(".legend").append(entry);
    return entry.querySelector("b");
  }

  #listen() {
    this.svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      this.cursor.set(this.#nearest(this.#timeAt(x))?.time ?? null);
    });
    this.svg.addEventListener("pointerleave", () => this.cursor.set(null));
    this.svg.addEventListener("blur", () => this.cursor.set(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    this.cursor.addEventListener("move", () => this.#drawCursor());
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  #key(event) {
    if (event.key === "Escape") return this.cursor.set(null);
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const count = this.points.length;
    if (!count) return;
    const found = this.points.findIndex((point) => point.time === this.cursor.time);
    const next = this.points[Math.min(count - 1, Math.max(0, (found < 0 ? count : found) + step))];
    this.cursor.set(next.time);
    this.#describe(next);
  }

  /** Show `samples` (oldest first) of the time from `start` to `end`. */
  update(samples, start, end) {
    this.window = [start, end];
    this.size = Math.max(1, Math.round((end - start) / POINTS));
    const shown = samples.filter((sample) => sample.time >= start);
    this.points = points(shown, this.spec.series, this.size);
    this.latest = shown.length ? points(shown.slice(-1), this.spec.series, 1)[0] : null;
    this.draw();
  }

  #nearest(time) {
    let best = null;
    for (const point of this.points) {
      if (best === null || Math.abs(point.time - time) < Math.abs(best.time - time)) best = point;
    }
    return best;
  }

  #timeAt(x) {
    const [start, end] = this.window;
    return start + ((x - LEFT) / Math.max(1, this.width - LEFT - RIGHT)) * (end - start);
  }

  #x(time) {
    const [start, end] = this.window;
    return LEFT + ((time - start) / (end - start)) * (this.width - LEFT - RIGHT);
  }

  #y(value) {
    return this.height - BOTTOM - (value / this.top) * (this.height - TOP - BOTTOM);
  }

  draw() {
    const box = this.svg.getBoundingClientRect();
    if (!box.width) return;
    this.width = box.width;
    this.height = box.height;
    this.svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const found = this.points.flatMap((point) => point.values).filter((value) => value !== null);
    const most = Math.max(this.spec.least ?? 0, ...found);
    const ticks = valueTicks(this.spec.top ?? most);
    this.top = ticks[ticks.length - 1];
    const layers = [this.#axes(ticks)];
    // The first series lies on top: it is the one the chart is about.
    this.spec.series.forEach((_, index) => layers.splice(1, 0, this.#line(index)));
    this.cursorLayer = svg("g");
    this.svg.replaceChildren(...layers, this.cursorLayer);
    this.card.dataset.values = found.length;
    this.#drawCursor();
    this.#describe(null);
  }

  #axes(ticks) {
    const group = svg("g");
    for (const tick of ticks) {
      const y = Math.round(this.#y(tick)) + 0.5;
      group.append(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      const label = svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" });
      label.textContent = this.spec.format(tick);
      group.append(label);
    }
    const { ticks: times, step } = timeTicks(...this.window, Math.max(2, Math.floor(this.width / 90)));
    for (const time of times) {
      const x = this.#x(time);
      if (x < LEFT + 14 || x > this.width - 22) continue;
      const label = svg("text", { x, y: this.height - 5, "text-anchor": "middle" });
      label.textContent = clock(time, step);
      group.append(label);
    }
    return group;
  }

  #line(index) {
    const group = svg("g", { class: `series-${index}` });
    let run = [];
    const close = () => {
      if (run.length === 1) group.append(svg("circle", { class: "dot", cx: run[0][0], cy: run[0][1], r: 1.8 }));
      if (run.length > 1) {
        const path = run.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
        const floor = this.#y(0).toFixed(1);
        const last = run[run.length - 1][0].toFixed(1);
        if (index === 0 && !this.spec.lines) {
          const area = `M${run[0][0].toFixed(1)},${floor}L${path}L${last},${floor}Z`;
          group.append(svg("path", { class: "area", d: area }));
        }
        group.append(svg("path", { class: "stroke", d: `M${path}` }));
      }
      run = [];
    };
    let before = null;
    for (const { time, values } of this.points) {
      const value = values[index];
      if (value === null || (before !== null && time - before > LONGEST_STEP * this.size)) close();
      if (value !== null) run.push([this.#x(time), this.#y(value)]);
      before = time;
    }
    close();
    return group;
  }

  #drawCursor() {
    if (!this.cursorLayer) return;
    this.cursorLayer.replaceChildren();
    const time = this.cursor.time;
    const pointed = time === null ? null : this.points.find((point) => point.time === time);
    const read = pointed ?? this.latest;
    this.time.textContent = pointed ? clock(pointed.time) : "";
    this.spec.series.forEach((_, index) => {
      const value = read ? read.values[index] : null;
      this.values[index].textContent = value === null ? "–" : this.spec.format(value);
      if (!pointed || value === null) return;
      const spot = { class: `dot series-${index}`, cx: this.#x(pointed.time), cy: this.#y(value), r: 3 };
      this.cursorLayer.append(svg("circle", spot));
    });
    if (pointed) {
      const x = Math.round(this.#x(pointed.time)) + 0.5;
      this.cursorLayer.prepend(
        svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }),
      );
    }
  }

  /** What a screen reader says: the values at a point, or the latest ones. */
  #describe(point) {
    const values = this.spec.series.map((series, i) => `${series.label} ${this.values[i].textContent}`);
    const when = point ? `at ${clock(point.time)}` : "now";
    this.svg.setAttribute("aria-label", `${this.spec.title}, ${when}: ${values.join(", ")}`);
  }
}
