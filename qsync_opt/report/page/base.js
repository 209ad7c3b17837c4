"use strict";
// Everything is built from text nodes and attributes: names in the data are never read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const operators = data.operators;
const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const element = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);

// The same rounding as the package's texts: three significant digits, in the unit that suits the size.
function scaled(value, steps) {
  const size = Math.abs(value);
  const [factor, unit] = steps.find((step) => size / step[0] < 999.5) || steps[steps.length - 1];
  const amount = size / factor;
  let text = String(amount);
  if (factor > 1 || amount !== Math.trunc(amount)) {
    text = amount.toFixed(Math.max(0, 3 - String(Math.trunc(amount)).length));
    if (text.includes(".")) text = text.replace(/0+$/, "").replace(/\.$/, "");
  }
  return (value < 0 && text !== "0" ? "−" : "") + text + " " + unit;
}
const TIME = [[1, "ns"], [1e3, "µs"], [1e6, "ms"], [1e9, "s"]];
const MEMORY = [[1, "KiB"], [2 ** 10, "MiB"], [2 ** 20, "GiB"], [2 ** 30, "TiB"]];
const formatTime = (ns) => scaled(ns, TIME);
const formatMemory = (kib) => scaled(kib, MEMORY);
function formatNumber(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const rounded = Number(size.toPrecision(4));
  return (value < 0 ? "−" : "") + (size >= 1e-4 && size < 1e6 ? String(rounded) : rounded.toExponential().replace("+", ""));
}
// A number and its unit stay on one line.
const unbroken = (text) => text.replace(/(\d) (?=%|[nµm]?s\b|[KMGT]iB\b)/g, "$1\u00a0");
const signed = (value, format) => (value > 0 ? "+" : "") + format(value);

// A name from the model: its own direction of writing, and breaks where its parts meet.
const named = (name) => element("bdi", {}, ...name.split(/(?<=[./_])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part])));
const LONG = 24; // Letters of a cell that may break into lines.
const chip = (format) => element("span", { class: "chip p" + data.slots[format] }, data.formats[format]);
const isChosen = (index) => data.roles[operators.role[index]] === "adjustable";

// Ticks at 1, 2 or 5 times a power of ten.
function ticks(low, high, count) {
  const rough = Math.max((high - low) / count, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9));
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i += 1) result.push(i * step);
  return result;
}
// Ticks of an axis, [value, text]: all in one unit, with as many decimals as their distance needs. ``size`` is what one
// of the values is worth in the first unit of ``steps``.
function labelledTicks(low, high, count, steps, size) {
  const [factor, unit] = steps.find((step) => high * size / step[0] < 999.5) || steps[steps.length - 1];
  const values = ticks(low * size / factor, high * size / factor, count);
  const decimals = values.length > 1 ? Math.max(0, -Math.floor(Math.log10(values[1] - values[0]) + 1e-9)) : 2;
  return values.map((value) => [value * factor / size, value ? value.toFixed(decimals) + " " + unit : "0"]);
}

// One tooltip for all drawings. What it says also stands in tables, so it is hidden from screen readers.
const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
document.body.append(tip);
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
}
function withTip(node, textAt) {
  node.addEventListener("pointermove", (event) => showTip(event, textAt(event)));
  node.addEventListener("pointerleave", () => showTip(null, ""));
}

// Draw now, and again whenever the width changes.
function whenSized(node, draw) {
  let width = 0;
  const redraw = () => {
    const now = Math.floor(node.getBoundingClientRect().width);
    if (now && now !== width) {
      width = now;
      draw(width);
    }
  };
  new ResizeObserver(redraw).observe(node);
}

function figures(title, header, rows) {
  const summary = element("summary", {}, title);
  const details = element("details", {}, summary);
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(plainTable(title, header, rows()));
  });
  return details;
}
function plainTable(title, header, rows) {
  const kinds = header.map((_, i) => (i === 0 ? null : rows.some((row) => row[i].length > LONG) ? "long" : "number"));
  return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
    element("table", {},
      element("caption", { class: "hidden" }, title),
      element("thead", {}, element("tr", {}, ...header.map((text, i) => element("th", { scope: "col", class: kinds[i] }, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, i) =>
        i ? element("td", { class: kinds[i] }, unbroken(cell)) : element("th", { scope: "row" }, cell)))))));
}
