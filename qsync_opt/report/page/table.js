// The table of operators: one device at a time, searched, filtered, sorted, a page at a time.
const PAGE = 25;
const view = { device: 0, text: "", precision: "", role: "", sort: "index", descending: false, page: 0, open: new Set(), found: -1, all: false };

const COLUMNS = [
  { key: "index", title: "#", number: true, value: (i) => i },
  { key: "name", title: "Operator", value: (i) => operators.name[i] },
  { key: "precision", title: "Precision", value: (i) => here().precision[i] },
  { key: "time", title: "Time", number: true, value: (i) => timeOf(i) },
  { key: "memory", title: "Memory", number: true, value: (i) => here().memory_kib[i] },
  { key: "sensitivity", title: "Sensitivity", number: true, value: (i) => here().sensitivity[i] },
  { key: "reason", title: "Why", value: (i) => here().reason[i] },
];
const here = () => data.devices[view.device].operators;
const timeOf = (i) => here().forward_ns[i] + here().backward_ns[i] + here().cast_ns[i];

function matching() {
  const words = view.text.toLowerCase().split(/\s+/).filter(Boolean);
  const result = [];
  for (let i = 0; i < operators.name.length; i += 1) {
    if (view.precision !== "" && here().precision[i] !== Number(view.precision)) continue;
    if (view.role !== "" && operators.role[i] !== Number(view.role)) continue;
    const text = (operators.name[i] + " " + operators.type[i]).toLowerCase();
    if (words.every((word) => text.includes(word))) result.push(i);
  }
  const { value } = COLUMNS.find((column) => column.key === view.sort);
  const sign = view.descending ? -1 : 1;
  return result.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -sign : x > y ? sign : 0) || a - b;
  });
}

function operatorLinks(indexes) {
  const result = [];
  [...new Set(indexes)].forEach((index, i) => {
    if (i) result.push(", ");
    result.push(element("a", { href: "#op-" + (index + 1) }, named(operators.name[index])));
  });
  return result;
}
function moreRow(index) {
  const found = here();
  const reads = operatorLinks(operators.inputs[index]);
  const bucket = operators.bucket[index];
  const cell = element("td", { role: "cell", colspan: COLUMNS.length },
    element("p", {}, "Type " + operators.type[index] + ", " + operators.elements[index].toLocaleString("en") + " output elements" +
      (bucket === null ? "" : ", gradient bucket " + bucket) + "."),
    element("p", {}, "Forward " + formatTime(found.forward_ns[index]) + ", backward " + formatTime(found.backward_ns[index]) +
      ", casts charged to it " + formatTime(found.cast_ns[index]) + "."),
    element("p", {}, "Reads ", ...(reads.length ? reads : ["no other operator"]), "."));
  const alternatives = found.alternatives[index];
  if (alternatives.length) {
    cell.append(plainTable("Other precisions of " + operators.name[index],
      ["Instead", "Sensitivity", "Iteration time", "Computing time", "Memory", "Casts", "Followers", "Limits"],
      alternatives.map(([precision, iteration, computing, memory, sensitivity, casts, pushed, broken]) => [
        data.formats[precision], signed(sensitivity, formatNumber), signed(iteration, formatTime), signed(computing, formatTime),
        signed(memory, formatMemory), signed(casts, String), String(pushed), broken.length ? "breaks " + broken.join(" and ") : "kept",
      ])));
  }
  return element("tr", { role: "row", class: "more", id: "more-" + index }, cell);
}
function operatorRow(index) {
  const open = view.open.has(index);
  const button = element("button", { type: "button", "aria-expanded": String(open), "aria-controls": open ? "more-" + index : null,
    "aria-label": (open ? "Less" : "More") + " about " + operators.name[index] }, open ? "Less" : "More");
  button.addEventListener("click", () => {
    if (open) view.open.delete(index);
    else view.open.add(index);
    drawRows();
    document.querySelector("#op-" + (index + 1) + " td.why button").focus();
  });
  const found = here();
  const cell = (column, kind, ...content) => element("td", { role: "cell", class: kind, "data-label": COLUMNS[column].title }, ...content);
  const row = element("tr", { id: "op-" + (index + 1), role: "row", class: view.found === index ? "found" : null },
    cell(0, "number place", String(index + 1)),
    element("th", { scope: "row", role: "rowheader" }, named(operators.name[index]), element("small", {}, operators.type[index] + ", " + data.roles[operators.role[index]])),
    cell(2, "format", chip(found.precision[index])),
    cell(3, "number", unbroken(formatTime(timeOf(index)))),
    cell(4, "number", unbroken(formatMemory(found.memory_kib[index]))),
    cell(5, "number", formatNumber(found.sensitivity[index])),
    cell(6, "why", unbroken(found.reason[index]), " ", button));
  return open ? [row, moreRow(index)] : [row];
}

const tableParts = {};
function drawRows() {
  const rows = matching();
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  view.page = Math.max(0, Math.min(view.page, pages - 1));
  const shown = view.all ? rows : rows.slice(view.page * PAGE, (view.page + 1) * PAGE);
  tableParts.body.replaceChildren(...shown.flatMap(operatorRow));
  tableParts.count.textContent = rows.length === operators.name.length ? rows.length + " operators" : rows.length + " of " + operators.name.length + " operators";
  tableParts.place.textContent = "Page " + (view.page + 1) + " of " + pages;
  tableParts.back.disabled = view.page === 0;
  tableParts.next.disabled = view.page === pages - 1;
  tableParts.pages.hidden = pages === 1;
  COLUMNS.forEach((column, i) => {
    tableParts.heads[i].setAttribute("aria-sort", view.sort !== column.key ? "none" : view.descending ? "descending" : "ascending");
  });
}
function change(values) {
  Object.assign(view, { page: 0, found: -1 }, values);
  drawRows();
}

function labelled(text, control, kind) {
  return element("div", { class: kind }, element("label", { for: control.id }, text), control);
}
function choice(id, names, apply) {
  const select = element("select", { id }, ...names.map(([value, text]) => element("option", { value }, text)));
  select.addEventListener("change", () => apply(select.value));
  return select;
}
function drawTable() {
  const search = element("input", { type: "search", id: "search", placeholder: "Name or type", autocomplete: "off", spellcheck: "false" });
  search.addEventListener("input", () => change({ text: search.value }));
  const device = choice("device", data.devices.map((d, i) => [i, d.name]), (value) => change({ device: Number(value) }));
  const precision = choice("precision", [["", "All"], ...data.formats.map((name, i) => [i, name])], (value) => change({ precision: value }));
  const role = choice("role", [["", "All"], ...data.roles.map((name, i) => [i, name])], (value) => change({ role: value }));
  tableParts.count = element("p", { class: "count", role: "status" });
  tableParts.controls = { search, device, precision, role };
  const controls = element("div", { class: "controls", role: "search", "aria-label": "Operators" }, labelled("Search", search, "grow"),
    data.devices.length > 1 ? labelled("Device", device) : null, labelled("Precision", precision), labelled("Role", role), tableParts.count);

  tableParts.heads = COLUMNS.map((column) => {
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => change({ sort: column.key, descending: view.sort === column.key ? !view.descending : Boolean(column.number && column.key !== "index") }));
    return element("th", { scope: "col", role: "columnheader", class: column.number ? "number" : null }, button);
  });
  // Narrow screens lay rows out as blocks, which takes the meaning of a table from it unless roles say it.
  tableParts.body = element("tbody", { role: "rowgroup" });
  const table = element("table", { class: "operators-table", role: "table" },
    element("caption", { class: "hidden" }, "Operators; the headings sort"),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...tableParts.heads)), tableParts.body);

  tableParts.back = element("button", { type: "button" }, "Previous page");
  tableParts.next = element("button", { type: "button" }, "Next page");
  tableParts.place = element("p", {});
  tableParts.back.addEventListener("click", () => { view.page -= 1; drawRows(); });
  tableParts.next.addEventListener("click", () => { view.page += 1; drawRows(); });
  tableParts.pages = element("div", { class: "pages" }, tableParts.back, tableParts.place, tableParts.next);
  document.getElementById("operators-body").append(controls,
    element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of operators" }, table), tableParts.pages);
  drawRows();
}

// A link to an operator (#op-12) clears what hides it, turns to its page and marks it.
function followHash() {
  const match = /^#op-(\d+)$/.exec(location.hash);
  if (!match || Number(match[1]) < 1 || Number(match[1]) > operators.name.length) return;
  const index = Number(match[1]) - 1;
  for (const name of ["search", "precision", "role"]) tableParts.controls[name].value = "";
  Object.assign(view, { text: "", precision: "", role: "", found: index });
  view.open.add(index);
  view.page = Math.floor(matching().indexOf(index) / PAGE);
  drawRows();
  const row = document.getElementById("op-" + (index + 1));
  row.scrollIntoView({ block: "center" });
  row.querySelector("td.why button").focus({ preventScroll: true });
}
