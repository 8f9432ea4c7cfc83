// Numbers for people: round axis ticks, and amounts, durations and times as short text. Pure functions.

/** Round steps from 0 to at least `top`, about `count` of them. */
export function valueTicks(top, count = 3) {
  const raw = Math.max(top, 1e-9) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= raw * 0.999);
  const ticks = [];
  for (let n = 0; n === 0 || ticks[ticks.length - 1] < top * 0.999; n++) ticks.push(n * step);
  return ticks;
}

/** Unix seconds of round local times within [start, end], about `count` of them. */
export function timeTicks(start, end, count = 4) {
  const steps = [10, 15, 30, 60, 120, 300, 600];
  const step = steps.find((s) => (end - start) / s <= count) ?? 600;
  const offset = new Date(start * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((start - offset) / step) * step + offset;
  const ticks = [];
  for (let t = first; t <= end; t += step) ticks.push(t);
  return { ticks, step };
}

/** Local time of day; with seconds unless the step is whole minutes. */
export function clock(seconds, step = 1) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (step % 60) options.second = "2-digit";
  return new Date(seconds * 1000).toLocaleTimeString([], options);
}

/** A count or rate in at most four figures: 0, 3.2, 87, 1,240, 15.3k, 2.1M. */
export function amount(value) {
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(1).replace(/\.0$/, "");
  if (value < 10_000) return Math.round(value).toLocaleString("en");
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)}k`;
  if (value < 1e9) return `${(value / 1e6).toFixed(1)}M`;
  return `${(value / 1e9).toFixed(1)}G`;
}

/** A duration in seconds as milliseconds or seconds. */
export function duration(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 0.001) return `${(seconds * 1000).toFixed(2)} ms`;
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** A share from 0 to 1 as a percentage. */
export function percent(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
}

/** How long something has lasted: 42 s, 12 min, 3 h 05 min, 2 d 4 h. */
export function span(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.max(0, Math.round(seconds))} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A count of things: 1 answer, 12 answers. */
export function things(count, noun) {
  return `${amount(count)} ${noun}${count === 1 ? "" : "s"}`;
}
