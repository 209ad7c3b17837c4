// Line drawings: the fronts, and memory over time.
const MARGIN = { left: 74, right: 16, top: 14, bottom: 44 };

// A scale knows where in its range (0 to 1) a value lies, and its ticks with their texts.
function linear([low, high], steps, size) {
  const plain = (count) => ticks(low, high, count).map((value) => [value, formatNumber(value)]);
  const ticksOf = steps ? (count) => labelledTicks(low, high, count, steps, size || 1) : plain;
  return { at: (value) => (value - low) / (high - low || 1), ticks: ticksOf, note: "" };
}
// Values of many decades are drawn logarithmically; zero, which has no logarithm, gets a place below them.
const DECADES = 50;
function sensitivityScale(values) {
  const positive = values.filter((value) => value > 0);
  const [low, high] = [Math.min(...positive), Math.max(...positive)];
  if (!positive.length || high / low < DECADES) return linear([0, high * 1.08 || 1]);
  const [first, last] = [Math.floor(Math.log10(low)), Math.log10(high * 1.3)];
  const floor = values.length > positive.length ? 0.12 : 0;
  const at = (value) => (value > 0 ? floor + (1 - floor) * Math.max(0, (Math.log10(value) - first) / (last - first)) : 0);
  const decades = (count) => {
    const step = Math.max(1, Math.ceil((last - first) / count));
    const result = floor ? [[0, "0"]] : [];
    for (let power = first; power <= last; power += step) result.push([Number("1e" + power), formatNumber(Number("1e" + power))]);
    return result;
  };
  return { at, ticks: decades, note: " (logarithmic)" };
}

function frame(width, height, scaleX, scaleY, titleX, titleY) {
  const plot = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const atX = (value) => plot.left + scaleX.at(value) * (plot.right - plot.left);
  const atY = (value) => plot.bottom - scaleY.at(value) * (plot.bottom - plot.top);
  const parts = [];
  for (const [value, text] of scaleY.ticks(5)) {
    parts.push(shape("path", { class: "grid", d: "M" + plot.left + " " + atY(value) + "H" + plot.right }),
      shape("text", { x: plot.left - 8, y: atY(value) + 4, "text-anchor": "end" }, text));
  }
  for (const [value, text] of scaleX.ticks(Math.max(2, Math.floor(width / 100)))) {
    parts.push(shape("path", { class: "axis", d: "M" + atX(value) + " " + plot.bottom + "v4" }),
      shape("text", { x: atX(value), y: plot.bottom + 17, "text-anchor": "middle" }, text));
  }
  parts.push(shape("path", { class: "axis", d: "M" + plot.left + " " + plot.bottom + "H" + plot.right }),
    shape("text", { x: (plot.left + plot.right) / 2, y: height - 8, "text-anchor": "middle" }, titleX),
    shape("text", { transform: "translate(12 " + (plot.top + plot.bottom) / 2 + ") rotate(-90)", "text-anchor": "middle" }, titleY));
  return { plot, atX, atY, parts };
}
function spread(values, share) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = (high - low || Math.abs(high) || 1) * share;
  return [Math.max(0, low - pad), high + pad];
}
// A text near a point, on the side where there is room.
function beside(plot, x, y, text, kind, dy) {
  const right = x + 10 + 7 * text.length < plot.right;
  return shape("text", { class: kind, x: right ? x + 10 : x - 10, y: Math.max(plot.top + 10, y + dy), "text-anchor": right ? "start" : "end" }, text);
}

function frontChart(title, axis, format, steps, points, chosen, limit, uniform) {
  const drawing = shape("svg", { role: "img", height: 320, "aria-label": title + ". " + points.length + " plans, from " + describe(points[0], axis, format) +
    " to " + describe(points[points.length - 1], axis, format) + ". This plan: " + describe(chosen, axis, format) + "." });
  const chart = element("div", { class: "chart" }, drawing);
  whenSized(chart, (width) => {
    // The uniform plans are drawn where they lie within a margin of the front; the table has all.
    const own = [...points.map((p) => p.x), chosen.x];
    const [least, most] = [Math.min(...own), Math.max(...own)];
    // A limit that is far beyond every plan would press them into a corner: it is told, not drawn.
    const far = limit > most + Math.max(2 * (most - least), 0.5 * most);
    if (!far) own.push(limit);
    const reach = (Math.max(...own) - Math.min(...own)) * 0.35;
    const near = uniform.filter((p) => p.x >= Math.min(...own) - reach && p.x <= Math.max(...own) + reach);
    const x = spread([...own, ...near.map((p) => p.x)], 0.06);
    const top = Math.max(...points.map((p) => p.y), chosen.y);
    const scale = sensitivityScale([...points, chosen, ...near.filter((p) => p.y <= top)].map((p) => p.y));
    const { plot, atX, atY, parts } = frame(width, 320, linear(x, steps), scale, axis, "Sensitivity" + scale.note);
    const sorted = [...points].sort((a, b) => a.x - b.x);
    const path = (key) => sorted.map((p, i) => (i ? "H" + atX(p.x) + "V" + atY(p[key]) : "M" + atX(p.x) + " " + atY(p[key]))).join("");
    if (far) parts.push(shape("text", { class: "limit-text", x: plot.right, y: plot.top - 2, "text-anchor": "end" }, "limit " + format(limit) + " →"));
    else {
      parts.push(shape("path", { class: "limit", d: "M" + atX(limit) + " " + plot.top + "V" + plot.bottom }),
        beside(plot, atX(limit), plot.top, "limit", "limit-text", 10));
    }
    parts.push(shape("path", { class: "bound", d: path("bound") }), shape("path", { class: "front", d: path("y") }));
    for (const p of sorted) parts.push(shape("circle", { class: "point", cx: atX(p.x), cy: atY(p.y), r: 3.5 }));
    const [cx, cy] = [atX(chosen.x), atY(chosen.y)];
    for (const p of near.filter((one) => one.y <= top)) {
      const [px, py] = [atX(p.x), atY(p.y)];
      // Its label goes up where the chosen plan's would be in the way.
      const crowded = Math.abs(px - cx) < 90 && Math.abs(py - cy) < 24;
      parts.push(shape("rect", { class: "uniform", x: px - 4, y: py - 4, width: 8, height: 8 }), beside(plot, px, py, p.label, "", crowded ? -26 : -6));
    }
    parts.push(shape("path", { class: "chosen", d: "M" + cx + " " + (cy - 8) + "l8 8l-8 8l-8 -8z" }), beside(plot, cx, cy, "this plan", "strong", -10));
    drawing.replaceChildren(...parts);
    const marks = [...sorted, ...near, chosen];
    drawing.onpointermove = (event) => {
      const box = drawing.getBoundingClientRect();
      const distance = (p) => Math.hypot(atX(p.x) - event.clientX + box.left, atY(p.y) - event.clientY + box.top);
      const nearest = marks.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      showTip(event, distance(nearest) < 24 ? (nearest.label ? nearest.label + "\n" : "") + describe(nearest, axis, format) : "");
    };
    drawing.onpointerleave = () => showTip(null, "");
  });
  return element("figure", {}, element("figcaption", {}, title), chart,
    figures("Figures of this drawing", ["Plan", axis, "Sensitivity", "Bound"], () => [
      ["This plan", format(chosen.x), formatNumber(chosen.y), ""],
      ...points.map((p, i) => ["Front " + (i + 1), format(p.x), formatNumber(p.y), formatNumber(p.bound)]),
      ...uniform.map((p) => [p.label, format(p.x), formatNumber(p.y), ""]),
    ]));
}
function describe(point, axis, format) {
  return axis + " " + format(point.x) + ", sensitivity " + formatNumber(point.y);
}
const uniformLabel = (row) => (row.label === "lowest" ? "lowest" : "all " + row.label);

function drawFronts() {
  const body = document.getElementById("front-body");
  if (!data.fronts) return;
  const charts = element("div", { class: "charts" });
  const latency = data.fronts.latency.map(([y, bound, x]) => ({ x, y, bound }));
  const other = (value) => data.uniform.map((row) => ({ x: value(row), y: row.objective, label: uniformLabel(row) }));
  if (latency.length) {
    charts.append(frontChart("Sensitivity against iteration time", "Iteration time", formatTime, TIME, latency,
      { x: data.iteration_ns, y: data.objective, label: "this plan" }, data.latency_limit_ns, other((row) => row.iteration_ns)));
  }
  data.devices.forEach((device, i) => {
    const points = data.fronts.memory[i].map(([y, bound, , memory]) => ({ x: memory[i], y, bound }));
    if (!points.length) return;
    charts.append(frontChart("Sensitivity against memory of " + device.name, "Memory", formatMemory, MEMORY, points,
      { x: device.memory_kib, y: data.objective, label: "this plan" }, device.memory_limit_kib, other((row) => row.memory_kib[i])));
  });
  body.append(charts.children.length ? charts : element("p", { class: "note" }, "No plan keeps the other limits, so there is no front."));
}

// Bands that stay are stacked below what comes and goes. Without that knowledge, operators are added up in model order.
function memoryBands(device) {
  const memory = device.memory;
  return [
    ["Parameters", memory.parameters_bytes], ["Optimizer state", memory.optimizer_bytes], ["All-reduce buckets", memory.buckets_bytes],
    ["Gradients and passing buffers (allowance)", memory.gradients_bytes + memory.transient_bytes],
  ].filter((band) => band[1] > 0);
}
function drawMemory(device, number) {
  const place = document.getElementById("memory-" + number);
  const memory = device.memory;
  const measured = data.measured && data.measured.peak_memory_bytes[number];
  const bands = memory ? memoryBands(device) : [];
  const base = bands.reduce((sum, band) => sum + band[1], 0);
  const times = memory ? memory.times_ns : [0];
  const values = memory ? memory.held_bytes : [0];
  if (!memory) {
    device.operators.memory_kib.forEach((kib, i) => {
      times.push(i + 1);
      values.push(values[i] + (kib + device.operators.buffer_kib[i]) * 1024);
    });
  }
  const format = (bytes) => formatMemory(bytes / 1024);
  const peak = base + Math.max(...values);
  const limit = device.memory_limit_kib * 1024;
  const end = times[times.length - 1];
  const top = Math.max(peak, limit <= 2.5 * peak ? limit : 0, measured || 0) * 1.06;
  const drawing = shape("svg", { role: "img", height: 300, "aria-label": "Memory of " + device.name + (memory ? " over one iteration" : " added up in model order") +
    ": at most " + format(peak) + ", limit " + format(limit) + "." });
  const label = memory ? "Activations and cast buffers" : "Operators so far, with their cast buffers";
  whenSized(place, (width) => {
    const { plot, atX, atY, parts } = frame(width, 300, linear([0, end], memory ? TIME : null), linear([0, top], MEMORY, 1 / 1024),
      memory ? "Time in the iteration" : "Operators, in model order", "Memory");
    let low = 0;
    bands.forEach((band, i) => {
      parts.push(shape("rect", { class: "band-" + (i + 1), x: plot.left, y: atY(low + band[1]), width: plot.right - plot.left, height: Math.max(0, atY(low) - atY(low + band[1])) }));
      low += band[1];
    });
    const steps = values.map((value, i) => (i ? "H" + atX(times[i]).toFixed(1) + "V" + atY(low + value).toFixed(1) : "M" + plot.left + " " + atY(low + value).toFixed(1))).join("");
    parts.push(shape("path", { class: "band-5", d: steps + "V" + atY(low) + "H" + plot.left + "Z" }));
    const at = memory ? memory.peak_ns : end;
    const near = atX(at) > (plot.left + plot.right) / 2;
    // The labels of lines stand at the end that is far from the peak's.
    const aside = { x: near ? plot.left + 6 : plot.right, "text-anchor": near ? "start" : "end" };
    if (limit <= top) {
      parts.push(shape("path", { class: "limit", d: "M" + plot.left + " " + atY(limit) + "H" + plot.right }),
        shape("text", { ...aside, class: "limit-text", y: atY(limit) - 5 }, "limit " + format(limit)));
    }
    if (measured) {
      parts.push(shape("path", { class: "measured", d: "M" + plot.left + " " + atY(measured) + "H" + plot.right }),
        shape("text", { ...aside, class: "strong", y: atY(measured) + 14 }, "measured peak " + format(measured)));
    }
    parts.push(shape("circle", { class: "chosen", cx: atX(at), cy: atY(peak), r: 4.5 }),
      shape("text", { class: "strong", x: atX(at) + (near ? -9 : 9), y: Math.max(plot.top + 2, atY(peak) - 8), "text-anchor": near ? "end" : "start" }, (memory ? "peak " : "total ") + format(peak)));
    drawing.replaceChildren(...parts);
  });
  const legend = element("ul", { class: "legend" }, ...[...bands.map((band, i) => [i + 1, band[0] + " " + format(band[1])]), [5, label + " up to " + format(Math.max(...values))]]
    .map(([kind, text]) => element("li", {}, element("span", { class: "swatch band-" + kind }), text)));
  place.append(drawing, legend);
}
