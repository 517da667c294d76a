// Draws the report from the JSON in #data. No library, no network. `#unit=NAME` in the address chooses a unit.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const LANE = {compute: 22, transfer: 9, gap: 8, label: 70, axis: 18};
const MEANINGS = {
  "forward": "forward, in the unit's colour", "backward": "backward, in the unit's colour",
  "other": "other: loss, optimizer, data", "idle": "idle: between operations",
};
const ownColour = {
  "other": "#bbbbbb", "gather wait": "#d62728", "reduce wait": "#ff7f0e", "rank wait": "#e377c2",
  "copy": "#7f7f7f", "launch": "#444444", "idle": "#eeeeee",
};
const begin = Math.min(...data.timelines.map((t) => t.start_us));
const end = Math.max(...data.timelines.map((t) => t.stop_us));
let view = {from: begin, to: end};
let chosenUnit = -1;
let matches = null; // indices of units that the search has found

// Text

function unitName(index) {
  return index < 0 ? "" : data.units[index].name;
}

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let power = 0;
  while (nbytes >= 1024 && power < units.length - 1) { nbytes /= 1024; power += 1; }
  return `${power ? nbytes.toFixed(1) : nbytes} ${units[power]}`;
}

function time(us) {
  return `${(us / 1000).toFixed(3)} ms`;
}

function shown(field, value) {
  return field.endsWith("_nbytes") ? size(value) : String(value);
}

function label(field) {
  return field.replace(/_nbytes$/, "").replace(/_ms$/, ", ms").replaceAll("_", " ");
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function withCode(text) { // `name` as code
  return text.split("`").map((part, i) => (i % 2 ? element("code", part) : part));
}

// Colours: a unit has one hue everywhere; neighbours have different ones.

function unitColour(index, lightness = 55) {
  return index < 0 ? "#999999" : `hsl(${(index * 137.5) % 360} 60% ${lightness}%)`;
}

function spanColour(does, unit) {
  if (does === "forward") return unitColour(unit, 62);
  if (does === "backward") return unitColour(unit, 45);
  return ownColour[does];
}

// The timeline

const canvas = find("timeline");
const context = canvas.getContext("2d");
const hasCopies = data.timelines.some((t) => t.transfers.some(([kind]) => laneOf(kind) === 2));
const lanes = hasCopies ? ["gather", "reduce", "copies"] : ["gather", "reduce"];
const rankHeight = LANE.compute + lanes.length * LANE.transfer + LANE.gap;

function laneOf(kind) { // copies from and to the host have one of their own
  return kind === 0 ? 0 : kind < 3 ? 1 : 2;
}

function toX(us) {
  return LANE.label + ((us - view.from) / (view.to - view.from)) * (canvas.clientWidth - LANE.label);
}

function toTime(x) {
  return view.from + ((x - LANE.label) / (canvas.clientWidth - LANE.label)) * (view.to - view.from);
}

function bar(start, duration, y, height, colour, unit) {
  const left = Math.max(toX(start), LANE.label);
  const right = toX(start + duration);
  if (right < LANE.label || left > canvas.clientWidth) return;
  const isFaint = matches !== null ? !matches.has(unit) : chosenUnit >= 0 && unit !== chosenUnit;
  context.globalAlpha = isFaint ? 0.25 : 1;
  context.fillStyle = colour;
  context.fillRect(left, y, Math.max(right - left, 0.6), height);
  if (right - left > 40 && unit >= 0 && height > 12) {
    context.fillStyle = "#000000";
    context.save();
    context.beginPath();
    context.rect(left, y, right - left - 2, height);
    context.clip();
    context.fillText(unitName(unit), left + 3, y + height / 2);
    context.restore();
  }
}

function draw() {
  const scale = window.devicePixelRatio || 1;
  const height = LANE.axis + data.timelines.length * rankHeight;
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  data.timelines.forEach((timeline, row) => {
    const top = LANE.axis + row * rankHeight;
    for (const [does, unit, start, duration] of timeline.spans) {
      bar(start, duration, top, LANE.compute, spanColour(data.does[does], unit), unit);
    }
    for (const [kind, unit, start, duration] of timeline.transfers) {
      const y = top + LANE.compute + laneOf(kind) * LANE.transfer + 1;
      bar(start, duration, y, LANE.transfer - 2, unitColour(unit, kind === 2 || kind === 4 ? 30 : 55), unit);
    }
    context.globalAlpha = 1;
    context.fillStyle = getComputedStyle(document.body).color;
    context.fillText(`rank ${timeline.rank}`, 2, top + LANE.compute / 2);
    lanes.forEach((name, lane) => context.fillText(name, 14, top + LANE.compute + (lane + 0.5) * LANE.transfer));
  });
  drawAxis();
}

function drawAxis() {
  const rough = (view.to - view.from) / 8;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  context.fillStyle = getComputedStyle(document.body).color;
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    context.fillRect(toX(at), LANE.axis - 5, 1, 4);
    context.fillText(`${+(at / 1000).toPrecision(6)} ms`, toX(at) + 3, LANE.axis / 2);
  }
}

// What lies at a point of the canvas: {text, unit}
function at(x, y) {
  const row = Math.floor((y - LANE.axis) / rankHeight);
  const timeline = data.timelines[row];
  if (!timeline || x < LANE.label) return null;
  const inside = y - LANE.axis - row * rankHeight;
  const moment = toTime(x);
  const slack = (view.to - view.from) / canvas.clientWidth;
  const hit = ([, , start, duration]) => start - slack <= moment && moment <= start + duration + slack;
  if (inside < LANE.compute) {
    const span = timeline.spans.find(([, , start, duration]) => start <= moment && moment <= start + duration);
    return span ? {text: `${data.does[span[0]]} ${unitName(span[1])}: ${time(span[3])}`, unit: span[1]} : null;
  }
  const lane = Math.floor((inside - LANE.compute) / LANE.transfer);
  const transfer = timeline.transfers.find((each) => laneOf(each[0]) === lane && hit(each));
  if (!transfer) return null;
  const early = transfer[4] ? ", prefetched" : "";
  return {text: `${data.kinds[transfer[0]]} ${unitName(transfer[1])}: ${time(transfer[3])}${early}`, unit: transfer[1]};
}

function zoom(factor, around) {
  const middle = around === undefined ? (view.from + view.to) / 2 : around;
  const from = middle - (middle - view.from) * factor;
  const to = middle + (view.to - middle) * factor;
  show(from, to);
}

function show(from, to) {
  const width = Math.min(Math.max(to - from, 5), end - begin);
  const left = Math.min(Math.max(from, begin), end - width);
  view = {from: left, to: left + width};
  draw();
}

function showUnit(index) {
  const found = data.timelines[0].spans.filter(([, unit]) => unit === index);
  if (!found.length) return;
  const [, , start, duration] = found.reduce((a, b) => (b[3] > a[3] ? b : a));
  show(start - 4 * duration, start + 5 * duration);
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, toTime(event.offsetX));
}, {passive: false});
let drag = null;
canvas.addEventListener("pointerdown", (event) => { drag = {x: event.offsetX, ...view, moved: false}; });
canvas.addEventListener("pointermove", (event) => {
  if (drag && Math.abs(event.offsetX - drag.x) > 3) {
    drag.moved = true;
    const by = ((event.offsetX - drag.x) / (canvas.clientWidth - LANE.label)) * (drag.to - drag.from);
    show(drag.from - by, drag.to - by);
  }
  const found = at(event.offsetX, event.offsetY);
  find("under").textContent = found ? found.text : "\u00a0";
});
window.addEventListener("pointerup", () => { if (drag && !drag.moved) drag = null; else setTimeout(() => { drag = null; }); });
canvas.addEventListener("click", (event) => {
  const found = drag && drag.moved ? null : at(event.offsetX, event.offsetY);
  if (found && found.unit >= 0) choose(found.unit);
});
find("closer").addEventListener("click", () => zoom(0.5));
find("wider").addEventListener("click", () => zoom(2));
find("whole").addEventListener("click", () => show(begin, end));
find("search").addEventListener("input", (event) => {
  const text = event.target.value.trim();
  matches = text ? new Set(data.units.flatMap((unit, i) => (unit.name.includes(text) ? [i] : []))) : null;
  for (const row of document.querySelectorAll("#units tbody tr")) {
    row.hidden = matches !== null && !matches.has(Number(row.dataset.unit));
  }
  draw();
});
find("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && matches && matches.size) {
    const first = [...matches][0];
    choose(first);
    showUnit(first);
  }
});

// The unit that was chosen

function choose(index) {
  chosenUnit = index;
  const unit = data.units[index];
  const list = element("dl");
  for (const [field, value] of Object.entries(unit)) {
    if (field === "name") continue;
    const pair = element("div");
    pair.append(element("dt", label(field)));
    pair.append(element("dd", shown(field, value), {"data-field": field, "data-value": String(value)}));
    list.append(pair);
  }
  const heading = element("b", unit.name, {"data-name": unit.name});
  const close = element("button", "close");
  close.addEventListener("click", () => { chosenUnit = -1; find("chosen").hidden = true; mark(); draw(); });
  find("chosen").replaceChildren(heading, " ", close, list);
  find("chosen").hidden = false;
  mark();
  draw();
}

function mark() {
  for (const row of document.querySelectorAll("tr[data-unit]")) {
    row.classList.toggle("chosen", Number(row.dataset.unit) === chosenUnit);
  }
}

// Tables

function table(id, columns, rows) {
  const head = element("tr");
  const body = element("tbody");
  columns.forEach(([title], column) => {
    const cell = element("th", title);
    cell.addEventListener("click", () => {
      const isDown = cell.dataset.order !== "down";
      cell.dataset.order = isDown ? "down" : "up";
      const value = (row) => rows[row.dataset.row][column].value;
      const compare = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (isDown ? -1 : 1);
      body.append(...[...body.children].sort(compare));
    });
    head.append(cell);
  });
  rows.forEach((cells, position) => {
    const row = element("tr", undefined, {"data-row": position});
    if (cells.unit !== undefined && cells.unit >= 0) {
      row.dataset.unit = cells.unit;
      row.addEventListener("click", () => choose(cells.unit));
    }
    cells.forEach((cell) => row.append(element("td", cell.text)));
    body.append(row);
  });
  const header = element("thead");
  header.append(head);
  find(id).replaceChildren(header, body);
}

function cellsOf(object, fields) {
  return fields.map((field) => ({value: object[field], text: shown(field, object[field])}));
}

function fillTables() {
  const fields = Object.keys(data.units[0]).filter((field) => !["is_small", "bucket_nbytes"].includes(field));
  const place = (field) => (field === "name" ? 0 : field.endsWith("_ms") ? 1 : 2); // names and times are seen first
  fields.sort((a, b) => place(a) - place(b));
  table("units", fields.map((field) => [label(field)]),
    data.units.map((unit, index) => Object.assign(cellsOf(unit, fields), {unit: index})));
  const totals = Object.keys(data.rank_totals[0]);
  table("ranks", totals.map((field) => [label(field)]), data.rank_totals.map((rank) => cellsOf(rank, totals)));
  const byName = new Map(data.units.map((unit, index) => [unit.name, index]));
  table("owners", [["unit"], ["what"], ["at the peak"]], data.memory.owners.map((owner) =>
    Object.assign(cellsOf(owner, ["unit", "what"]), {unit: byName.get(owner.unit)})
      .concat([{value: owner.nbytes, text: size(owner.nbytes)}])));
  const {ranks, rows, first_difference: difference} = data.collectives;
  const columns = ["collective", "last rank", "later by, ms", ...ranks.map((rank) => `rank ${rank}, ms`)];
  table("order", columns.map((title) => [title]), rows.map(([kind, unit, later, last, ...starts]) => {
    const name = `${data.kinds[kind]} ${unitName(unit)}`;
    const times = [later, ...starts].map((us) => ({value: us, text: (us / 1000).toFixed(3)}));
    return Object.assign([{value: name, text: name}, {value: last, text: String(last)}, ...times], {unit});
  }));
  find("order-text").textContent = difference === null
    ? `All ranks ran the same ${rows.length} collectives in the same order. Times are those of their starts.`
    : `The ranks differ at position ${difference.position}: ` +
      Object.entries(difference.by_rank).map(([rank, name]) => `rank ${rank} has ${name}`).join("; ") + ".";
}

// What the plan predicted

function fillPrediction() {
  const prediction = data.prediction;
  if (prediction === null) return;
  find("predicted").hidden = false;
  const machine = `${prediction.num_gpus} x ${prediction.machine}`;
  find("prediction-text").replaceChildren(
    `The plan chose ${prediction.choice}, for ${prediction.workload}. `,
    element("b", `It predicts the times of ${machine}.`),
    ` They were measured on ${data.device}` +
      (prediction.same_machine ? "." : ", which is another machine: they are not compared."));
  const text = (figure, value) => (value === null ? "not known" :
    figure.endsWith("_ms") ? value.toFixed(3) : size(value));
  table("prediction", [["figure"], [`predicted for ${machine}`], ["measured"], ["measured / predicted"]],
    prediction.rows.map(({figure, predicted, measured, ratio}) =>
      [{value: figure, text: label(figure)}, {value: predicted, text: text(figure, predicted)},
        {value: measured, text: text(figure, measured)},
        {value: ratio, text: ratio === null ? "" : ratio.toFixed(2)}]));
}

// Memory

function drawMemory() {
  const {rank, times_us: moments, series, peak_nbytes: peak, allocated_nbytes: allocated, owners} = data.memory;
  const points = moments.map((time, i) => [time, series.reduce((sum, each) => sum + each.nbytes[i], 0)]);
  const x = (us) => ((us - begin) / (end - begin)) * 1000;
  const y = (nbytes) => 160 - (nbytes / Math.max(peak, 1)) * 158; // the top is the peak, the bottom 0
  let path = "";
  points.forEach(([us, nbytes], i) => {
    path += i ? `H${x(us).toFixed(1)}V${y(nbytes).toFixed(1)}` : `M${x(us).toFixed(1)} ${y(nbytes).toFixed(1)}`;
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  for (const [name, value] of [["d", path + "H1000"], ["fill", "none"], ["stroke", "#1f77b4"], ["stroke-width", "2"],
    ["vector-effect", "non-scaling-stroke"]]) line.setAttribute(name, value);
  find("memory").replaceChildren(line);
  find("memory-top").textContent = size(peak);
  const times = [0, 0.25, 0.5, 0.75, 1].map((part) => `${(((end - begin) * part) / 1000).toFixed(1)} ms`);
  find("memory-times").replaceChildren(...times.map((text) => element("span", text)));
  const first = owners.slice(0, 3).map((owner) => `${owner.unit} (${owner.what}, ${size(owner.nbytes)})`).join(", ");
  const measured = allocated === null ? "" : ` The device's allocator peaked at ${size(allocated)}.`;
  find("memory-text").textContent =
    `Besides shards, their gradients and activations, rank ${rank} held at most ${size(peak)}: ${first}` +
    `${owners.length > 3 ? ` and ${owners.length - 3} more` : ""}.${measured}`;
}

// Start

function start() {
  find("title").textContent = `${data.model}: one step`;
  const all = data.steps_ms.map((ms) => ms.toFixed(1)).join(", ");
  const some = data.timelines.length < data.ranks.length ? `, ${data.timelines.length} of them drawn` : "";
  find("summary").textContent = `${data.device}; ${data.ranks.length} ranks${some}; ${data.units.length} units; ` +
    `steps of ${all} ms, of which step ${data.step} is shown, counted from 0: ` +
    `${data.steps_ms[data.step].toFixed(1)} ms`;
  for (const each of data.findings) {
    const item = element("li");
    item.append(element("span", `up to ${each.gain_ms.toFixed(1)} ms: `, {class: "gain"}), ...withCode(each.text));
    find("findings").append(item);
  }
  if (!data.findings.length) find("findings").replaceWith(element("p", "Nothing: no rule found time to win."));
  for (const does of data.does) {
    const key = element("span");
    const colour = ownColour[does] || (does === "forward" ? "hsl(210 60% 62%)" : "hsl(210 60% 45%)");
    key.append(element("span", undefined, {class: "key", style: `background: ${colour}`}));
    key.append(MEANINGS[does] || does);
    find("legend").append(key);
  }
  fillTables();
  fillPrediction();
  drawMemory();
  draw();
  window.addEventListener("resize", draw);
  chooseFromAddress();
  window.addEventListener("hashchange", chooseFromAddress);
}

function chooseFromAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("unit");
  const index = data.units.findIndex((unit) => unit.name === wanted);
  if (index < 0) return;
  choose(index);
  showUnit(index);
}

start();
