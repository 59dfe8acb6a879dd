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
  for (const name of ["before", "after"]) {
    document.getElementById(`show-${name}`).addEventListener("change", (event) => {
      chart.classList.toggle(`hide-${name}`, !event.target.checked);
    });
  }
  follow(chart, data.lines.end_seconds, (seconds) => {
    const shown = [["after", "as planned"], ["before", "without recompute"]];
    return shown.filter(([name]) => !chart.classList.contains(`hide-${name}`)).map(([name, words]) => {
      const [, size, place, phase] = runAt(data.lines[name], seconds);
      return `${words}: ${sized(size)}\n${phase}: ${place}`;
    });
  });
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
