"use strict";
// What the pages share: how sizes and times are written, and the line that follows the pointer over a chart.
const data = JSON.parse(document.getElementById("data").textContent);

function sized(size) {
  for (const [unit, factor, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
    if (Math.abs(size) >= factor) return `${(size / factor).toFixed(digits)} ${unit}`;
  }
  return `${size} B`;
}

function timed(seconds) {
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} us`;
  return seconds < 1 ? `${(seconds * 1e3).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

function follow(chart, endSeconds, linesAt) {
  const cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    tip.textContent = [timed(share * endSeconds), ...linesAt(share * endSeconds)].join("\n");
    cursor.style.left = `${share * 100}%`;
    tip.style.left = share < 0.5 ? `calc(${share * 100}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
    cursor.hidden = tip.hidden = false;
  });
  chart.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
}
