// The predicted timeline: lanes of events, drawn for the part that is in view; what is too narrow is drawn together.
const LANE = { height: 26, gap: 6, title: 18 };
const WAITING = 6; // The kind of what is no event: a compute stream that waits.

// Binary search for the first event that ends after a time.
function firstAfter(lane, time) {
  let [low, high] = [0, lane.start_ns.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.start_ns[middle] + lane.duration_ns[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}
// Pieces to draw between two times: [kind, start, end, first event, last event]; event -1 is waiting. Events that are
// too narrow to be seen are put together, in the colour of the kind that takes most of their time.
function pieces(lane, from, to, narrow) {
  const result = [];
  let small = null;
  const flush = () => {
    if (!small) return;
    const kind = small.spent.indexOf(Math.max(...small.spent));
    const last = result[result.length - 1];
    if (last && last[0] === kind && last[3] !== last[4] && last[2] >= small.start) [last[2], last[4]] = [small.end, small.last];
    else result.push([kind, small.start, small.end, small.first, small.last]);
    small = null;
  };
  const add = (kind, start, end, event) => {
    if (end - start >= narrow) {
      flush();
      result.push([kind, start, end, event, event]);
      return;
    }
    if (!small) small = { start, first: event, spent: Array(WAITING + 1).fill(0) };
    small.spent[kind] += end - start;
    Object.assign(small, { end, last: event });
    if (end - small.start >= narrow) flush();
  };
  for (let i = firstAfter(lane, from); i < lane.start_ns.length && lane.start_ns[i] < to; i += 1) {
    const before = i ? lane.start_ns[i - 1] + lane.duration_ns[i - 1] : 0;
    if (lane.start_ns[i] > before) {
      if (lane.stream === "compute") add(WAITING, before, lane.start_ns[i], -1);
      else flush();
    }
    if (lane.duration_ns[i]) add(lane.kind[i], lane.start_ns[i], lane.start_ns[i] + lane.duration_ns[i], i);
  }
  flush();
  return result;
}
function eventName(lane, i) {
  const kind = data.kinds[lane.kind[i]];
  if (kind === "optimizer") return "optimizer";
  if (kind === "all-reduce") return "all-reduce of bucket " + lane.what[i];
  return (lane.label[i] ? "cast " + lane.label[i] + ", " : "") + operators.name[lane.what[i]];
}
function eventTip(lane, time) {
  const i = firstAfter(lane, time);
  if (i === lane.start_ns.length) return "";
  if (lane.start_ns[i] > time) {
    if (lane.stream !== "compute") return "";
    const before = i ? lane.start_ns[i - 1] + lane.duration_ns[i - 1] : 0;
    return "waiting\n" + formatTime(lane.start_ns[i] - before);
  }
  const waited = lane.waited_for.length ? "\nstarted after " + lane.waited_for[i] : "";
  return eventName(lane, i) + "\n" + data.kinds[lane.kind[i]] + ", " + formatTime(lane.duration_ns[i]) + " from " + formatTime(lane.start_ns[i]) + waited;
}

function drawTimeline() {
  const whole = Math.max(data.iteration_ns, 1);
  const end = Math.max(whole, (data.measured && data.measured.iteration_ns) || 0, data.latency_limit_ns <= 1.3 * whole ? data.latency_limit_ns : 0) * 1.01;
  const span = { from: 0, to: end };
  const drawing = shape("svg", { role: "img", "aria-label": "Timeline of one iteration; the table above has its sums" });
  const box = element("div", { class: "lanes", tabindex: 0, role: "group", "aria-label": "Timeline", "aria-describedby": "timeline-help" }, drawing);
  const lanes = data.timeline.filter((lane) => lane.start_ns.length);
  const layout = [];
  let height = 4;
  lanes.forEach((lane) => {
    const compute = lane.stream === "compute";
    if (compute && layout.length) height += 8;
    layout.push({ lane, title: height + 12, top: height + LANE.title });
    height += LANE.title + LANE.height + LANE.gap;
  });
  const bottom = height;
  drawing.setAttribute("height", bottom + 42);

  let width = 0;
  const draw = () => {
    if (!width) return;
    const at = (time) => (time - span.from) / (span.to - span.from) * width;
    const narrow = (span.to - span.from) / width * 1.2;
    const parts = [shape("defs", {}, shape("pattern", { id: "waiting", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      shape("path", { class: "hatch", d: "M0 0V6" })))];
    for (const { lane, title, top } of layout) {
      const device = data.devices[lane.device];
      parts.push(shape("text", { class: "strong", x: 0, y: title }, device.name + ", " + lane.stream),
        shape("rect", { class: "ground", x: 0, y: top, width, height: LANE.height }));
      for (const [kind, start, stop, first, last] of pieces(lane, span.from, span.to, narrow)) {
        const [left, right] = [Math.max(at(start), 0), Math.min(at(stop), width)];
        if (right <= left) continue;
        const gap = first === last && right - left > 6 ? 0.6 : 0;
        parts.push(shape("rect", { class: "k" + kind, x: left.toFixed(2), y: top, width: Math.max(right - left - gap, 0.5).toFixed(2), height: LANE.height }));
        const name = first < 0 ? "waiting" : first === last ? eventName(lane, first) : "";
        if (name && right - left > 6.2 * name.length + 8) {
          parts.push(shape("text", { class: first < 0 ? "strong" : "on", x: (left + right) / 2, y: top + LANE.height / 2 + 4, "text-anchor": "middle" }, name));
        }
      }
    }
    const line = (time, kind, text) => {
      const x = at(time);
      if (x < 0 || x > width) return;
      const near = x > width / 2;
      parts.push(shape("path", { class: kind, d: "M" + x + " 0V" + (bottom + 4) }),
        shape("text", { class: "strong", x: near ? x - 4 : x + 4, y: bottom + 36, "text-anchor": near ? "end" : "start" }, text));
    };
    for (const [time, text] of labelledTicks(span.from, span.to, Math.max(2, Math.floor(width / 100)), TIME, 1)) {
      const x = at(time);
      parts.push(shape("path", { class: "axis", d: "M" + x + " " + bottom + "v4" }),
        shape("text", { x, y: bottom + 17, "text-anchor": x < 20 ? "start" : x > width - 24 ? "end" : "middle" }, text));
    }
    parts.push(shape("path", { class: "axis", d: "M0 " + bottom + "H" + width }));
    line(data.latency_limit_ns, "limit", "limit " + formatTime(data.latency_limit_ns));
    if (data.measured && data.measured.iteration_ns) line(data.measured.iteration_ns, "measured", "measured " + formatTime(data.measured.iteration_ns));
    drawing.replaceChildren(...parts);
    place.textContent = "Shown: " + formatTime(span.from) + " to " + formatTime(Math.min(span.to, end));
  };
  const show = (from, to) => {
    const length = Math.min(Math.max(to - from, end / 5000), end);
    span.from = Math.min(Math.max(0, from), end - length);
    span.to = span.from + length;
    draw();
  };
  const zoom = (factor, share) => {
    const middle = span.from + (span.to - span.from) * share;
    const length = (span.to - span.from) * factor;
    show(middle - length * share, middle + length * (1 - share));
  };
  const move = (share) => show(span.from + (span.to - span.from) * share, span.to + (span.to - span.from) * share);
  const actions = [["Zoom in", () => zoom(0.5, 0.5)], ["Zoom out", () => zoom(2, 0.5)], ["Earlier", () => move(-0.3)], ["Later", () => move(0.3)], ["Whole iteration", () => show(0, end)]];
  const buttons = actions.map(([text, act]) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", act);
    return button;
  });
  const keys = { "+": 0, "=": 0, "-": 1, ArrowLeft: 2, ArrowRight: 3, Home: 4, 0: 4 };
  box.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[keys[event.key]][1]();
  });
  const timeAt = (event) => {
    const area = drawing.getBoundingClientRect();
    return span.from + (event.clientX - area.left) / area.width * (span.to - span.from);
  };
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (timeAt(event) - span.from) / (span.to - span.from));
  }, { passive: false });
  let held = null;
  box.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from: span.from, to: span.to };
    box.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) box.addEventListener(name, () => { held = null; });
  box.addEventListener("pointermove", (event) => {
    if (held) {
      const shift = (event.clientX - held.x) / width * (held.to - held.from);
      show(held.from - shift, held.to - shift);
      return;
    }
    const y = event.clientY - drawing.getBoundingClientRect().top;
    const found = layout.find(({ top }) => y >= top && y < top + LANE.height);
    showTip(event, found ? eventTip(found.lane, timeAt(event)) : "");
  });
  box.addEventListener("pointerleave", () => showTip(null, ""));
  const place = element("p", { class: "count", role: "status" });
  const names = [[0, "forward"], [1, "backward"], [2, "cast"], [4, "all-reduce"], [5, "optimizer"], [WAITING, "waiting"]];
  const legend = element("ul", { class: "legend" }, ...names.map(([kind, text]) => element("li", {}, element("span", { class: "swatch k" + kind }), text)));
  document.getElementById("timeline-body").append(legend, element("div", { class: "controls" }, ...buttons, place), box,
    element("p", { class: "help", id: "timeline-help" }, "Drag to move; Ctrl and the wheel zoom. Keys: + and −, left and right, 0 for the whole iteration."));
  whenSized(drawing, (now) => { width = now; draw(); });
}
