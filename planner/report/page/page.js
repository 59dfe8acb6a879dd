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

const flame = document.getElementById("flame");

function told(path) {
  const chosen = path[path.length - 1], name = path.slice(1).map((module) => module.name).join(".") || chosen.name;
  return [name, chosen.text];
}

function block(path, left, share) {
  const module = path[path.length - 1];
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = module.name;
  [button.dataset.name] = told(path);
  button.title = told(path).join(": ");
  button.setAttribute("aria-label", button.title);
  button.style.left = `${100 * left}%`;
  button.style.width = `${100 * share}%`;
  button.style.top = `${26 * (path.length - 1)}px`;
  button.style.setProperty("--saved", `${100 * module.saved}%`);
  button.addEventListener("click", () => zoom(path).focus());
  return button;
}

function inside(path, left, share) {
  const module = path[path.length - 1], blocks = [];
  for (const part of module.parts) {
    const width = share * part.width / module.width;
    if (width > 0.002) blocks.push(block([...path, part], left, width), ...inside([...path, part], left, width));
    left += width;
  }
  return blocks;
}

function zoom(path) {
  const row = path.map((_, at) => block(path.slice(0, at + 1), 0, 1));
  const blocks = [...row, ...inside(path, 0, 1)];
  for (const above of row.slice(0, -1)) above.classList.add("above");
  flame.replaceChildren(...blocks);
  markModules();
  flame.style.height = `${Math.max(...blocks.map((one) => parseFloat(one.style.top))) + 26}px`;
  const name = document.createElement("b"), [called, words] = told(path);
  name.textContent = called;
  document.getElementById("module").replaceChildren(name, words);
  return row[row.length - 1];
}

const field = document.getElementById("find");
const counted = (found, word) => `${found.length} ${word}${found.length === 1 ? "" : "s"}`;
const has = (text) => field.value !== "" && text.toLowerCase().includes(field.value.toLowerCase());

function markModules() {
  for (const one of flame.children) one.classList.toggle("found", has(one.dataset.name));
}

function pathTo(path) {  // to the first module whose name is asked for
  const [name] = told(path);
  if (path.length > 1 && has(name)) return path;
  return path[path.length - 1].parts.map((part) => pathTo([...path, part])).find((found) => found) ?? null;
}

// Where what is looked for runs, in the plan's step: a line for each moment of the chart, a mark on its layers and modules.
function find() {
  const moments = (data.lines.after ?? []).filter(([, , place]) => has(place));
  const drawn = document.getElementById("found-times");
  const across = moments.map(([seconds]) => `M${(1000 * seconds / data.lines.end_seconds).toFixed(2)},0V300`);
  if (drawn) drawn.setAttribute("d", across.join(""));
  const layers = [...buttons].filter((button) => has(data.layers[button.dataset.layer].name));
  for (const button of buttons) button.classList.toggle("found", layers.includes(button));
  if (flame) markModules();
  const bytes = moments.length ? `, up to ${sized(Math.max(...moments.map(([, size]) => size)))} in use` : "";
  document.getElementById("found").textContent = field.value === "" ? ""
    : `${counted(moments, "moment")} of the step${bytes}; ${counted(layers, "layer")}`;
  return layers;
}

if (flame) zoom([data.modules]);
if (field) {
  field.addEventListener("input", find);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || field.value === "") return;
    const [layer] = find(), path = flame && pathTo([data.modules]);
    if (layer) choose(layer);
    if (path) zoom(path);
  });
}
