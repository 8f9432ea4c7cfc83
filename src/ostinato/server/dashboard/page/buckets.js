// The table of buckets: how many of the rows that steps computed were real, and how the steps ran.

import { amount, percent, things } from "/dashboard/scale.js";

function cell(text, kind = "td", className = "") {
  const element = document.createElement(kind);
  element.textContent = text;
  element.className = className;
  return element;
}

/** A bar whose filled part is the real rows. */
function bar(bucket, share) {
  const box = document.createElement("td");
  const outer = document.createElement("div");
  outer.className = `bar ${bucket.kind}`;
  outer.title = `${bucket.real_rows.toLocaleString()} real rows, ${bucket.pad_rows.toLocaleString()} pads`;
  const real = document.createElement("i");
  real.style.width = `${(1 - share) * 100}%`;
  outer.append(real);
  box.append(outer);
  return box;
}

/** What the table's rows do not say, in one line. */
function remarks(buckets, graphs) {
  const said = Object.entries(graphs?.eager_reasons ?? {}).map(([reason, steps]) => `${amount(steps)} ${reason}`);
  const lines = said.length ? [`Eager steps: ${said.join(", ")}.`] : [];
  const sum = (name) => buckets.reduce((total, bucket) => total + bucket[name], 0);
  if (sum("checked")) lines.push(`${things(sum("checked"), "replay")} checked, ${amount(sum("mismatches"))} differed.`);
  if (graphs?.never_replayed) lines.push(`${things(graphs.never_replayed, "graph")} captured, not replayed so far.`);
  return lines.join(" ");
}

/** Fill the table; buckets and graphs as in the server's data. */
export function showBuckets(buckets, graphs) {
  const rows = buckets.map((bucket) => {
    const share = bucket.pad_rows / (bucket.real_rows + bucket.pad_rows);
    const name = cell(bucket.key.replaceAll("/", " "), "th");
    name.scope = "row";
    const row = document.createElement("tr");
    row.append(name, bar(bucket, share));
    const counts = [bucket.captures, bucket.replays, bucket.advanced, bucket.eager, bucket.checked].map(amount);
    for (const text of [percent(share), ...counts]) row.append(cell(text, "td", "number"));
    if (bucket.quarantined) {
      row.className = "quarantined";
      name.title = "A replay differed from an eager run: its steps run eagerly since";
      name.append(" – quarantined");
    }
    return row;
  });
  document.getElementById("buckets").replaceChildren(...rows);
  document.getElementById("buckets-empty").hidden = rows.length > 0;
  document.querySelector(".buckets").hidden = rows.length === 0;
  document.getElementById("graph-note").textContent = remarks(buckets, graphs);
  const real = buckets.reduce((sum, bucket) => sum + bucket.real_rows, 0);
  const pads = buckets.reduce((sum, bucket) => sum + bucket.pad_rows, 0);
  document.getElementById("padding-note").textContent =
    real + pads ? `${percent(pads / (real + pads))} of ${amount(real + pads)} rows were pads` : "";
}
