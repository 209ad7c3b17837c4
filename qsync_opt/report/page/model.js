// The model as a tree of modules, each with a strip per device: one cell per operator, coloured by its precision.
const RUN = 25; // Names without modules are folded into runs of this many.
const EASY = 24; // Lines of the tree at first.

function makeTree() {
  const root = { name: "", children: new Map(), indexes: [] };
  const parts = operators.name.map((name) => name.split(/[./]/).filter(Boolean));
  const plain = parts.filter((path) => path.length < 2).length > RUN;
  parts.forEach((path, index) => {
    const leaf = path.length ? path[path.length - 1] : operators.name[index];
    let node = root;
    node.indexes.push(index);
    for (const part of path.length > 1 ? path.slice(0, -1) : plain ? [runName(index)] : []) {
      if (!node.children.has("m" + part)) node.children.set("m" + part, { name: part, children: new Map(), indexes: [] });
      node = node.children.get("m" + part);
      node.indexes.push(index);
    }
    node.children.set("o" + index, { name: leaf, index });
  });
  for (const child of root.children.values()) joinChains(child);
  return root;
}
function runName(index) {
  const first = Math.floor(index / RUN) * RUN;
  return "Operators " + (first + 1) + " to " + Math.min(first + RUN, operators.name.length);
}
// What holds nothing but one thing is shown as one line: "encoder.layer", or "embed/embedding" with its operator.
function joinChains(node) {
  while (node.children && node.children.size === 1) {
    const [only] = node.children.values();
    const joined = node.name + "." + only.name;
    node.name = only.children ? joined : operators.name[only.index].slice(-joined.length);
    node.children = only.children;
    node.index = only.index;
  }
  if (node.children) for (const child of node.children.values()) joinChains(child);
}

// Equal neighbours are one rectangle: of the same precision, chosen or not.
function runs(device, indexes) {
  const result = [];
  const precision = device.operators.precision;
  indexes.forEach((index, position) => {
    const last = result[result.length - 1];
    if (last && last.precision === precision[index] && last.chosen === isChosen(index)) last.end = position + 1;
    else result.push({ precision: precision[index], chosen: isChosen(index), start: position, end: position + 1 });
  });
  return result;
}
function counted(device, indexes) {
  const counts = data.formats.map(() => 0);
  for (const index of indexes) if (isChosen(index)) counts[device.operators.precision[index]] += 1;
  const parts = data.formats.map((name, i) => [name, counts[i]]).filter((part) => part[1]);
  return parts.length ? parts.map((part) => part[0] + " " + part[1]).join(" · ") : "none chosen";
}
function strip(device, indexes, height) {
  const drawing = shape("svg", { class: "strip", role: "img", "aria-label": device.name + ": " + counted(device, indexes) });
  whenSized(drawing, (width) => {
    const unit = width / indexes.length;
    const bars = [];
    for (const run of runs(device, indexes)) {
      const tall = run.chosen ? height : height / 2;
      const span = (run.end - run.start) * unit;
      const group = shape("g", { class: "p" + data.slots[run.precision] },
        shape("rect", { class: "p" + data.slots[run.precision], x: run.start * unit, y: height - tall, width: Math.max(span - (span > 3 ? 0.5 : 0), 0.5), height: tall }));
      const label = data.formats[run.precision];
      if (run.chosen && span > 8 * label.length) {
        group.append(shape("text", { x: run.start * unit + span / 2, y: height / 2 + 3.5, "text-anchor": "middle" }, label));
      }
      bars.push(group);
    }
    drawing.replaceChildren(shape("rect", { class: "ground", width, height }), ...bars);
  });
  withTip(drawing, (event) => {
    const box = drawing.getBoundingClientRect();
    const index = indexes[Math.floor((event.clientX - box.left) / box.width * indexes.length)];
    return index === undefined ? "" : operatorTip(device, index);
  });
  drawing.addEventListener("click", (event) => {
    const box = drawing.getBoundingClientRect();
    const index = indexes[Math.floor((event.clientX - box.left) / box.width * indexes.length)];
    if (index !== undefined) location.hash = "op-" + (index + 1);
  });
  return drawing;
}
function operatorTip(device, index) {
  const found = device.operators;
  const time = found.forward_ns[index] + found.backward_ns[index] + found.cast_ns[index];
  return operators.name[index] + "\n" + data.formats[found.precision[index]] + " on " + device.name + " (" + data.roles[operators.role[index]] +
    ")\n" + formatTime(time) + ", " + formatMemory(found.memory_kib[index]) + ", sensitivity " + formatNumber(found.sensitivity[index]);
}

function treeItem(node, depth) {
  const row = element("div", { class: "row d" + Math.min(depth, 4) });
  if (node.index !== undefined) {
    const name = node.name === operators.name[node.index] ? "" : ", " + operators.name[node.index];
    row.append(element("div", { class: "name leaf" },
      element("a", { href: "#op-" + (node.index + 1), "aria-label": node.name + name }, named(node.name))));
    for (const device of data.devices) {
      row.append(element("div", { class: "cell" }, chip(device.operators.precision[node.index]), " ",
        element("small", {}, element("span", { class: "who" }, device.name + " "), isChosen(node.index) ? "" : data.roles[operators.role[node.index]])));
    }
    return element("li", {}, row);
  }
  const fold = element("button", { type: "button", class: "fold", "aria-expanded": "false" },
    named(node.name), element("small", {}, node.indexes.length + (node.indexes.length === 1 ? " operator" : " operators")));
  row.append(element("div", { class: "name" }, fold));
  for (const device of data.devices) {
    row.append(element("div", { class: "cell" }, strip(device, node.indexes, 22),
      element("small", {}, element("span", { class: "who" }, device.name + ": "), counted(device, node.indexes))));
  }
  const item = element("li", {}, row);
  let list = null;
  node.open = (open) => {
    fold.setAttribute("aria-expanded", String(open));
    if (open && !list) {
      list = element("ul", {}, ...[...node.children.values()].map((child) => treeItem(child, depth + 1)));
      item.append(list);
    }
    if (list) list.hidden = !open;
  };
  fold.addEventListener("click", () => node.open(fold.getAttribute("aria-expanded") !== "true"));
  return item;
}
function openAll(node, open) {
  for (const child of node.children.values()) {
    if (!child.open) continue;
    child.open(open);
    // Folding the outer ones is enough; unfolding makes the inner ones first.
    openAll(child, open);
  }
}
// Unfold level by level as long as the whole stays easy to overlook.
function unfoldSome(tree) {
  let shown = tree.children.size;
  let level = [...tree.children.values()].filter((node) => node.open);
  while (level.length) {
    shown += level.reduce((sum, node) => sum + node.children.size, 0);
    if (shown > EASY) return;
    level.forEach((node) => node.open(true));
    level = level.flatMap((node) => [...node.children.values()]).filter((node) => node.open);
  }
}
function drawModel() {
  const tree = makeTree();
  const legend = element("ul", { class: "legend", "aria-label": "Precisions" },
    ...data.formats.map((name, i) => element("li", {}, chip(i), " ", i === 0 ? "lowest" : i === data.formats.length - 1 ? "highest" : "")));
  const whole = element("div", { class: "whole tall" }, ...data.devices.map((device) => element("figure", {},
    element("figcaption", {}, device.name + ": " + counted(device, tree.indexes)), strip(device, tree.indexes, 34))));
  const open = element("button", { type: "button" }, "Unfold all");
  const close = element("button", { type: "button" }, "Fold all");
  open.addEventListener("click", () => openAll(tree, true));
  close.addEventListener("click", () => openAll(tree, false));
  const list = element("ul", { class: "tree" }, ...[...tree.children.values()].map((child) => treeItem(child, 0)));
  // On wide screens devices are columns; readers hear the device's name in each cell instead.
  const heads = element("div", { class: "row heads", "aria-hidden": "true" }, element("div"), ...data.devices.map((device) => element("div", {}, device.name)));
  const body = element("div", {}, whole, element("div", { class: "controls" }, open, close), heads, list);
  body.style.setProperty("--devices", data.devices.length);
  document.getElementById("model-body").append(legend, body);
  unfoldSome(tree);
}
