const byId = (id) => document.getElementById(id);
let shown = null, pinned = null;

function made(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function outline(points) {
  const parts = ["M0,300"];
  points.forEach(([, size], at) => {
    const end = at + 1 < points.length ? points[at + 1][0] : points.end;
    parts.push(`V${(300 * (1 - size / data.top_bytes)).toFixed(1)}H${(1000 * end / data.end_seconds).toFixed(1)}`);
  });
  return `${parts.join("")}V300Z`;
}

function sizeAt(points, seconds) {
  let size = 0;
  for (const [begins, bytes] of points) {
    if (begins > seconds) break;
    size = bytes;
  }
  return seconds > points.end ? 0 : size;
}

function show(plan) {
  shown = plan;
  byId("slider").value = data.plans.indexOf(plan);
  byId("budget").textContent = plan.budget;
  byId("peak").textContent = plan.peak;
  byId("peak-note").textContent = plan.beside;
  byId("overhead").textContent = plan.overhead;
  byId("bound").textContent = plan.bound;
  byId("again").textContent = plan.again;
  byId("found").textContent = plan.found;
  byId("code").textContent = plan.code;
  byId("line-after").setAttribute("d", outline(plan.points));
  byId("line-pinned").setAttribute("d", pinned ? outline(pinned.points) : "");
  const height = 300 * (1 - plan.budget_bytes / data.top_bytes);
  for (const end of ["y1", "y2"]) byId("line-budget").setAttribute(end, height);
  showKinds(plan);
  showLayers(plan);
  for (const element of document.querySelectorAll("[data-row]")) {
    element.classList.toggle("hot", Number(element.dataset.row) === plan.row);
  }
}

function showKinds(plan) {
  const before = new Map(pinned ? pinned.anatomy : []);
  const kinds = [...new Set([...plan.anatomy.map(([kind]) => kind), ...before.keys()])];
  const sizes = new Map(plan.anatomy);
  byId("stack").replaceChildren(...kinds.map((kind) => {
    const bar = made("i", { className: `c${data.kinds.indexOf(kind) % 10}`, title: `${kind}, ${sized(sizes.get(kind) ?? 0)}` });
    bar.style.width = `${100 * (sizes.get(kind) ?? 0) / data.top_bytes}%`;
    return bar;
  }));
  byId("kinds").replaceChildren(...kinds.map((kind) => {
    const size = sizes.get(kind) ?? 0, more = size - (before.get(kind) ?? 0);
    const dot = made("i", { className: `dot c${data.kinds.indexOf(kind) % 10}` });
    const compared = pinned ? `${more < 0 ? "-" : "+"}${sized(Math.abs(more))}` : "-";
    return made("tr", {}, made("td", {}, dot, kind), made("td", { className: "n", textContent: sized(size) }),
      made("td", { className: "n", textContent: compared }));
  }));
}

function showLayers(plan) {
  byId("strip").replaceChildren(...plan.layers.map(([saved, freed, added], at) => {
    const bar = (name, share) => {
      const part = made("i", { className: name });
      part.style.height = `${Math.max(100 * share, 0)}%`;
      return part;
    };
    const words = `${data.layers[at]}: saves ${sized(saved)}, frees ${sized(freed)}, adds ${timed(added)}`;
    const button = made("button", { type: "button", title: words },
      made("span", { className: "up" }, bar("freed", freed / data.tallest), bar("saved", saved / data.tallest)),
      made("span", { className: "down" }, bar("added", added / data.longest)));
    button.setAttribute("aria-label", words);
    button.addEventListener("click", () => { byId("layer").textContent = words; });
    return button;
  }));
}

if (data.plans.length) {
  for (const plan of [data, ...data.plans]) plan.points.end = plan.step_seconds;
  byId("line-before").setAttribute("d", outline(data.points));
  byId("top").textContent = sized(data.top_bytes);
  byId("end").textContent = timed(data.end_seconds);
  byId("slider").addEventListener("input", (event) => show(data.plans[event.target.value]));
  byId("pin").addEventListener("click", () => {
    pinned = pinned ? null : shown;
    byId("pin").textContent = pinned ? `compared with the plan at ${pinned.budget}: end` : "compare with this plan";
    show(shown);
  });
  for (const element of document.querySelectorAll("[data-row]")) {
    const plan = data.plans.find((one) => one.row === Number(element.dataset.row));
    if (plan) element.addEventListener("click", () => show(plan));
    if (plan) element.classList.add("choice");
  }
  follow(byId("timeline-chart"), data.end_seconds, (seconds) => {
    const lines = [`this plan: ${sized(sizeAt(shown.points, seconds))}`,
      `without recompute: ${sized(sizeAt(data.points, seconds))}`];
    if (pinned) lines.push(`compared plan: ${sized(sizeAt(pinned.points, seconds))}`);
    return lines;
  });
  show(data.plans[data.chosen]);
}
