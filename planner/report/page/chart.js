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

// The pointer is followed over a chart of time; a stretch that is dragged over fills the chart, as do the keys + - and arrows.
function follow(chart, endSeconds, linesAt) {
  const cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip"), svg = chart.querySelector("svg");
  const axis = chart.parentNode.querySelector(".axis"), whole = chart.parentNode.querySelector(".whole");
  const picked = chart.appendChild(Object.assign(document.createElement("i"), { className: "picked", hidden: true }));
  let begin = 0, end = endSeconds, from = null;

  function shareAt(event) {
    const box = chart.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  }

  function zoom(low, high) {
    const width = Math.min(Math.max(high - low, endSeconds / 10000), endSeconds);
    begin = Math.min(Math.max(low, 0), endSeconds - width);
    end = begin + width;
    svg.setAttribute("viewBox", `${1000 * begin / endSeconds} 0 ${1000 * width / endSeconds} 300`);
    axis.firstElementChild.textContent = begin ? timed(begin) : "0 s";
    axis.lastElementChild.textContent = timed(end);
    for (const mark of axis.querySelectorAll("[data-share]")) {
      const share = (mark.dataset.share * endSeconds - begin) / width;
      mark.hidden = share < 0.15 || share > 0.85;
      mark.style.left = `${share * 100}%`;
    }
    whole.hidden = width === endSeconds;
    cursor.hidden = tip.hidden = true;
  }

  chart.addEventListener("pointermove", (event) => {
    const share = shareAt(event), seconds = begin + share * (end - begin);
    tip.textContent = [timed(seconds), ...linesAt(seconds)].join("\n");
    cursor.style.left = `${share * 100}%`;
    tip.style.left = share < 0.5 ? `calc(${share * 100}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${(1 - share) * 100}% + 10px)`;
    cursor.hidden = tip.hidden = false;
    picked.hidden = from === null;
    picked.style.left = `${100 * Math.min(from, share)}%`;
    picked.style.width = `${100 * Math.abs(share - from)}%`;
  });
  chart.addEventListener("pointerdown", (event) => { from = shareAt(event); });
  chart.addEventListener("pointerup", (event) => {
    const ends = [from ?? 0, shareAt(event)].sort((a, b) => a - b).map((share) => begin + share * (end - begin));
    if (from !== null && Math.abs(shareAt(event) - from) > 0.01) zoom(...ends);
    from = null;
    picked.hidden = true;
  });
  chart.addEventListener("pointerleave", () => {
    from = null;
    cursor.hidden = tip.hidden = picked.hidden = true;
  });
  chart.addEventListener("dblclick", () => zoom(0, endSeconds));
  chart.addEventListener("keydown", (event) => {
    const [low, high] = { "+": [0.25, 0.75], "=": [0.25, 0.75], "-": [-0.5, 1.5], ArrowLeft: [-0.25, 0.75],
      ArrowRight: [0.25, 1.25], Escape: [-Infinity, Infinity] }[event.key] ?? [];
    if (low === undefined) return;
    event.preventDefault();
    if (event.key === "Escape") zoom(0, endSeconds);
    else zoom(begin + low * (end - begin), begin + high * (end - begin));
  });
  whole.addEventListener("click", () => zoom(0, endSeconds));
}
