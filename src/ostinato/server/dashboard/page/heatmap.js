// The expert load as a grid, layers down and experts across, on a canvas. A cell's colour says how an expert's share
// compares with an even one: from a quarter (blue) over one (plain) to four times (orange), on a log scale. Grey-blue at
// the end of the scale stands for experts that got nothing. At the right: each layer's fullest expert beside the mean.

import { amount } from "/dashboard/scale.js";

const LEFT = 34;
const RIGHT = 46;
const TOP = 5;
const BOTTOM = 18;
const STOPS = {
  light: [[47, 99, 148], [228, 228, 223], [190, 70, 8]],
  dark: [[96, 156, 212], [52, 55, 60], [250, 134, 50]],
};

/** Whether the page is shown dark, by the user's choice or the system's. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Colour of a ratio to the even share. */
function colour(ratio) {
  const [cold, even, hot] = STOPS[isDark() ? "dark" : "light"];
  const place = Math.max(-1, Math.min(1, Math.log2(Math.max(ratio, 1e-9)) / 2));
  const end = place < 0 ? cold : hot;
  const mix = even.map((from, n) => Math.round(from + (end[n] - from) * Math.abs(place)));
  return `rgb(${mix.join(" ")})`;
}

export class HeatMap {
  constructor(canvas, key, readout) {
    this.canvas = canvas;
    this.key = key;
    this.readout = readout;
    this.load = [];
    this.cell = null; // [layer, expert] under the cursor
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#select(null));
    canvas.addEventListener("blur", () => this.#select(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  /** load: tokens by [layer][expert]. */
  update(load) {
    this.load = load;
    this.sums = load.map((row) => row.reduce((sum, count) => sum + count, 0));
    this.draw();
  }

  get #layers() {
    return this.load.length;
  }

  get #experts() {
    return this.load[0]?.length ?? 0;
  }

  #ratio(layer, expert) {
    const sum = this.sums[layer];
    return sum ? (this.load[layer][expert] * this.#experts) / sum : 1;
  }

  draw() {
    if (!this.#layers) return;
    const width = this.canvas.parentElement.clientWidth;
    this.cellHeight = Math.max(5, Math.min(22, Math.floor(340 / this.#layers)));
    this.cellWidth = (width - LEFT - RIGHT) / this.#experts;
    const height = TOP + this.cellHeight * this.#layers + BOTTOM;
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.#cells(pen);
    this.#labels(pen, width, height);
    this.#drawKey();
    this.#tell();
  }

  #cells(pen) {
    const gap = this.cellWidth > 6 && this.cellHeight > 6 ? 1 : 0;
    for (let layer = 0; layer < this.#layers; layer++) {
      for (let expert = 0; expert < this.#experts; expert++) {
        pen.fillStyle = colour(this.#ratio(layer, expert));
        const [x, y] = [LEFT + expert * this.cellWidth, TOP + layer * this.cellHeight];
        pen.fillRect(x, y, this.cellWidth - gap, this.cellHeight - gap);
      }
    }
    if (this.cell) {
      const [layer, expert] = this.cell;
      pen.strokeStyle = getComputedStyle(this.canvas).color;
      pen.lineWidth = 1.5;
      const [x, y] = [LEFT + expert * this.cellWidth, TOP + layer * this.cellHeight];
      pen.strokeRect(x, y + 0.5, this.cellWidth - gap, this.cellHeight - gap - 0.5);
    }
  }

  #labels(pen, width, height) {
    const style = getComputedStyle(this.readout.parentElement.querySelector(".heat-key"));
    pen.fillStyle = style.color;
    pen.font = `10.5px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    const everyLayer = Math.max(1, Math.ceil(13 / this.cellHeight));
    for (let layer = 0; layer < this.#layers; layer += everyLayer) {
      const y = TOP + (layer + 0.5) * this.cellHeight;
      pen.textAlign = "right";
      pen.fillText(layer === 0 ? "L 0" : String(layer), LEFT - 6, y);
      pen.textAlign = "left";
      if (this.sums[layer]) pen.fillText(`${this.#fullest(layer).toFixed(1)}×`, width - RIGHT + 8, y);
    }
    const fits = Math.ceil(30 / this.cellWidth);
    const every = [1, 2, 4, 8, 16, 32, 64].find((n) => n >= fits) ?? 128;
    pen.textAlign = "center";
    for (let expert = 0; expert < this.#experts; expert += every) {
      const text = expert === 0 ? "E 0" : String(expert);
      pen.fillText(text, LEFT + (expert + 0.5) * this.cellWidth, height - BOTTOM / 2 + 1);
    }
  }

  #fullest(layer) {
    return (Math.max(...this.load[layer]) * this.#experts) / this.sums[layer];
  }

  #drawKey() {
    const pen = this.key.getContext("2d");
    for (let x = 0; x < this.key.width; x++) {
      pen.fillStyle = colour(2 ** ((x / (this.key.width - 1)) * 4 - 2));
      pen.fillRect(x, 0, 1, this.key.height);
    }
  }

  #point(event) {
    const expert = Math.floor((event.offsetX - LEFT) / this.cellWidth);
    const layer = Math.floor((event.offsetY - TOP) / this.cellHeight);
    const inside = expert >= 0 && expert < this.#experts && layer >= 0 && layer < this.#layers;
    this.#select(inside ? [layer, expert] : null);
  }

  #move(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") this.#select(null);
    if (!step || !this.#layers) return;
    event.preventDefault();
    const [layer, expert] = this.cell ?? [0, -step[1]];
    const within = (n, size) => Math.max(0, Math.min(size - 1, n));
    this.#select([within(layer + step[0], this.#layers), within(expert + step[1], this.#experts)]);
  }

  #select(cell) {
    if (String(cell) === String(this.cell)) return;
    this.cell = cell;
    this.draw();
  }

  /** The line below: the cell under the cursor, or the least even layer. */
  #tell() {
    const total = Math.max(...this.sums);
    let text = "No tokens routed in this time.";
    if (this.cell) {
      const [layer, expert] = this.cell;
      const count = this.load[layer][expert];
      text = `layer ${layer}, expert ${expert}: ${amount(count)} tokens, ${this.#ratio(layer, expert).toFixed(2)}×`;
    } else if (total) {
      const peaks = this.load.map((_, layer) => (this.sums[layer] ? this.#fullest(layer) : 0));
      const worst = peaks.indexOf(Math.max(...peaks));
      text = `Least even: layer ${worst}, its fullest expert has ${peaks[worst].toFixed(1)}× an even share`;
    }
    this.readout.textContent = text;
    this.canvas.dataset.tokens = total;
    this.canvas.setAttribute("aria-label", `Expert load, ${this.#layers} layers by ${this.#experts} experts. ${text}`);
  }
}
