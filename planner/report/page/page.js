"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function shownBytes(size) {
  for (const [unit, factor, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
    if (size >= factor) return `${(size / factor).toFixed(digits)} ${unit}`;
  }
  return `${size} B`;
}

function shownSeconds(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} us`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

function runAt(points, seconds) {
  let low = 0, high = points.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= seconds) low = middle; else high = middle;
  }
  return points[low];
}

const chart = document.getElementById("timeline-chart");
if (chart) {
  const cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  for (const name of ["before", "after"]) {
    document.getElementById(`show-${name}`).addEventListener("change", (event) => {
      chart.classList.toggle(`hide-${name}`, !event.target.checked);
    });
  }
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const seconds = share * data.lines.end_seconds;
    const lines = [shownSeconds(seconds)];
    for (const [name, words] of [["after", "as planned"], ["before", "without recompute"]]) {
      if (chart.classList.contains(`hide-${name}`)) continue;
      const [, size, place, phase] = runAt(data.lines[name], seconds);
      lines.push(`${words}: ${shownBytes(size)}\n${phase}: ${place}`);
    }
    tip.textContent = lines.join("\n");
    cursor.style.left = `${share * 100}%`;
    tip.style.left = share < 0.5 ? `calc(${share * 100}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
    cursor.hidden = tip.hidden = false;
  });
  chart.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
}

function choose(button) {
  const layer = data.layers[button.dataset.layer];
  for (const other of document.querySelectorAll(".strip button")) {
    other.setAttribute("aria-pressed", String(other === button));
  }
  for (const row of document.querySelectorAll("tr[data-row]")) {
    row.classList.toggle("hot", Number(row.dataset.row) === layer.row);
  }
  const name = document.createElement("b");
  name.textContent = layer.name;
  document.getElementById("layer").replaceChildren(name, layer.text);
}

const buttons = document.querySelectorAll(".strip button");
for (const button of buttons) button.addEventListener("click", () => choose(button));
if (buttons.length) choose(buttons[buttons.length >> 1]);
