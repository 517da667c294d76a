// What the page of one report and that of two share: words, colours, tables, and the chart. Each of the two makes
// ``chart``, has ``choose(name)`` for a click on a unit, and ends with ``startPage()``. No library, no network.
"use strict";

const content = JSON.parse(document.getElementById("data").textContent);
const find = (id) => document.getElementById(id);
const LANE = {phase: 13, compute: 24, transfer: 13, memory: 130, gap: 10, label: 78, axis: 20, title: 20};

// Units: Paul Tol's "light", made for black labels. Waits: his "vibrant" and "bright", hatched, as no unit is. Memory:
// Okabe and Ito, with grey for their black. All can be told apart by readers who are colour-blind; see
// docs/debugging.md. This is JSON, since a test computes the contrasts.
const PALETTE = {
  "label": "#000000",
  "units": ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#99ddff", "#44bb99", "#bbcc33", "#aaaa00"],
  "bars": {"other": "#dddddd", "launch": "#999999"},
  "hatches": {
    "gather wait": {"light": "#cc3311", "dark": "#ee7733", "lines": "rising"},
    "reduce wait": {"light": "#0077bb", "dark": "#33bbee", "lines": "falling"},
    "other wait": {"light": "#aa3377", "dark": "#ee3377", "lines": "upright"},
    "copy": {"light": "#555555", "dark": "#bbbbbb", "lines": "level"},
    "idle": {"light": "#767676", "dark": "#888888", "lines": "dots"}
  },
  "series": ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"]
};
const LINES = { // of a tile of 8 x 8
  rising: [[0, 8, 8, 0], [-2, 2, 2, -2], [6, 10, 10, 6]], falling: [[0, 0, 8, 8], [-2, 6, 2, 10], [6, -2, 10, 2]],
  upright: [[4, 0, 4, 8]], level: [[0, 4, 8, 4]], dots: [[3, 4, 5, 4]],
};

// In this order on the page. The first that is a part of a column's title explains it.
const WORDS = {
  "gather wait": "compute waits until a unit's parameters have arrived, also where a rank came late.",
  "reduce wait": "compute waits until a unit's gradients are reduced, also where a rank came late.",
  "other wait": "a rank waits for collectives that belong to no unit, such as those of the optimizer.",
  "waits for gathers": "the part of gather waits that no rank is spared.",
  "waits for reductions": "the part of reduce waits that no rank is spared.",
  "waits for other ranks": "what this rank waits longer than the rank that waits least.",
  "launch": "the thread starts collectives, fills their buckets, and frees memory.",
  "copy": "out of buckets and into .grad; on an accelerator, into the buckets of reductions.",
  "idle": "no operation runs between those of compute; only known with profile=True.",
  "other": "outside of the model: loss, optimizer, data.",
  "exposed": "what the unit costs itself: the shortest wait of all ranks. Others wait longer for a late rank.",
  "gathers": "how often the unit's parameters are gathered in the step.",
  "direct": "travels without a copy: from the shard into the parameter, or from the gradient into the reduction.",
  "bucket": "travels with other tensors in one message, through a copy, since it is small or has another dtype.",
  "held": "what the unit takes at most if no other unit does: unsharded parameters, gradients and their copies.",
  "stays unsharded after forward": "reshard_after_forward=False: the parameters stay unsharded until backward.",
  "unsharded": "all of a unit's parameters, as its forward reads them.",
  "shard": "the part of a unit's parameters that stays on this rank.",
  "largest module": "the parameters of the module that holds most: a unit cannot be split further.",
  "replicas": "how many groups of ranks hold the same shards.",
  "temporary": "unsharded parameters, and gradients on their way.",
  "prefetched": "gathered before compute needed it.",
};

// Text

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let power = 0;
  while (Math.abs(nbytes) >= 1024 && power < units.length - 1) { nbytes /= 1024; power += 1; }
  return `${power ? nbytes.toFixed(1) : nbytes} ${units[power]}`;
}

function time(us) {
  return `${(us / 1000).toFixed(3)} ms`;
}

// Times have as many digits as the spread of steps supports, but are no finer than a microsecond.
function ms(value) {
  const {digits} = content.comparison ?? content;
  if (Math.abs(value) < 0.0005) return "0 ms";
  const decimals = Math.min(digits - 1 - Math.floor(Math.log10(Math.abs(value))), 3);
  return `${(Math.round(value * 10 ** decimals) / 10 ** decimals).toFixed(Math.max(decimals, 0))} ms`;
}

function shown(field, value) {
  if (field.endsWith("_nbytes")) return size(value);
  if (field.endsWith("_ms")) return ms(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return Number.isFinite(value) ? String(+value.toPrecision(4)) : String(value);
}

const LABELS = {is_small: "sent in one bucket", keeps_after_forward: "stays unsharded after forward",
  bucket_nbytes: "in one bucket below", thread_ms: "launches and copies"};

function label(field) {
  return LABELS[field] ?? field.replace(/_nbytes$|_ms$/, "").replaceAll("_", " ");
}

// The tail of a dotted name, which tells units apart, as long as ``fits`` says
function tail(name, fits) {
  if (fits(name)) return name;
  const parts = name.split(".");
  const tails = parts.slice(1).map((_, i) => `\u2026${parts.slice(i + 1).join(".")}`);
  return tails.find(fits) || "";
}

function shortName(text) { // in tables; words behind the name are kept
  const [name, ...words] = text.split(/(?=: )/);
  return [tail(name, (each) => each.length <= 32) || name, ...words].join("");
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function fillWords() {
  for (const [word, meaning] of Object.entries(WORDS)) find("words").append(element("dt", word), element("dd", meaning));
}

// Tables: rows are lists of {value, text}, with the name of a unit where a click chooses it.

function table(target, columns, rows) {
  const head = element("tr");
  const body = element("tbody");
  columns.forEach((title, column) => {
    const word = Object.keys(WORDS).find((each) => title.includes(each));
    const isText = typeof rows[0]?.[column].value === "string";
    const cell = element("th", undefined, {class: isText ? "text" : "number"});
    const button = element("button", title);
    cell.append(button);
    if (word) cell.title = `${word}: ${WORDS[word]}`;
    button.addEventListener("click", () => {
      const isDown = cell.ariaSort !== "descending";
      for (const each of head.children) each.ariaSort = null;
      cell.ariaSort = isDown ? "descending" : "ascending";
      const value = (row) => rows[row.dataset.row][column].value;
      const compare = (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (isDown ? -1 : 1);
      body.append(...[...body.children].sort(compare));
    });
    head.append(cell);
  });
  rows.forEach((cells, position) => {
    const row = element("tr", undefined, {"data-row": position});
    if (cells.unit) {
      row.dataset.unit = cells.unit;
      row.addEventListener("click", () => choose(cells.unit));
    }
    cells.forEach((cell, column) => {
      const made = element("td", undefined, {class: typeof cell.value === "string" ? "text" : cell.class ?? ""});
      if (cell.title) made.title = cell.title;
      made.append(cells.unit && !column ? element("button", cell.text) : cell.text);
      row.append(made);
    });
    body.append(row);
  });
  const header = element("thead");
  header.append(head);
  target.replaceChildren(header, body);
}

function nameCell(name) {
  const short = shortName(name);
  return short === name ? {value: name, text: name} : {value: name, text: short, title: name};
}

function cellsOf(object, fields) {
  return fields.map((field) => (typeof object[field] === "string" ? nameCell(object[field]) :
    {value: object[field], text: shown(field, object[field])}));
}

// The chart: rows of ranks and one of memory for each report, over one axis of time

function reportOf(data, title = "") {
  return {
    data, title,
    begin: Math.min(...data.timelines.map((each) => each.start_us)),
    end: Math.max(...data.timelines.map((each) => each.stop_us)),
  };
}

const LANE_OF = ["gather", "reduce", "reduce", "copies", "copies", "host"]; // by kind; the last two if there are any

class Chart {
  constructor(canvas, reports) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.reports = reports;
    this.duration = Math.max(...reports.map((each) => each.end - each.begin));
    this.view = {from: 0, to: this.duration};
    this.chosen = null; // the name of a unit
    this.matches = null; // names of units that the search has found
    const names = new Set(reports.flatMap((report) => report.data.units.map((unit) => unit.name)));
    const [root, ...others] = PALETTE.units; // the root runs beside the first and the last of the others
    this.colours = new Map([...names].map((name, i) => [name, i ? others[(i - 1) % others.length] : root]));
    this.memoryRank = reports[0].data.memory[0].rank;
    const memories = reports.flatMap((report) => report.data.memory);
    this.what = [...new Set(memories.flatMap((memory) => memory.series.map((each) => each.what)))];
    const kinds = reports.flatMap((r) => r.data.timelines.flatMap((t) => t.transfers.map(([kind]) => kind)));
    this.lanes = [...new Set(["gather", "reduce", ...kinds.sort().map((kind) => LANE_OF[kind])])];
    this.most = Math.max(1, ...memories.flatMap(({times_us: times, series}) =>
      times.map((_, i) => series.reduce((sum, each) => sum + each.nbytes[i], 0))));
    find("memory-rank").append(...[...new Set(memories.map(({rank}) => rank))].sort((a, b) => a - b).map((rank) => new Option(rank)));
    find("memory-rank").value = this.memoryRank;
    this.placeRows();
    this.listen();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const prepare = () => { this.scheme = scheme.matches ? "dark" : "light"; this.fills = new Map(); this.draw(); };
    scheme.addEventListener("change", prepare);
    window.addEventListener("resize", () => this.draw());
    prepare();
  }

  placeRows() {
    let top = LANE.axis;
    this.rows = [];
    const add = (row, height) => { this.rows.push({...row, top, height}); top += height + LANE.gap; };
    for (const report of this.reports) {
      if (report.title) add({report, title: report.title}, LANE.title - LANE.gap);
      for (const timeline of report.data.timelines) {
        add({report, timeline}, LANE.phase + LANE.compute + this.lanes.length * LANE.transfer);
      }
      add({report, memory: true}, LANE.memory);
    }
    this.height = top;
  }

  memoryOf(data) { // of the rank that the reader has chosen, or of the one that holds most
    return data.memory.find(({rank}) => rank === this.memoryRank) ?? data.memory[0];
  }

  toX(us) {
    const width = this.canvas.clientWidth - LANE.label;
    return LANE.label + ((us - this.view.from) / (this.view.to - this.view.from)) * width;
  }

  toTime(x) {
    const width = this.canvas.clientWidth - LANE.label;
    return this.view.from + ((x - LANE.label) / width) * (this.view.to - this.view.from);
  }

  // Drawing

  draw() {
    const {canvas, context} = this;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${this.height}px`;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = this.height * scale;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const {color, backgroundColor} = getComputedStyle(document.body);
    Object.assign(this, {ink: color, ground: backgroundColor});
    for (const row of this.rows) {
      if (row.timeline) this.drawRank(row);
      else if (row.memory) this.drawMemory(row);
      else this.write(row.title, 4, row.top + row.height / 2, "bold 12px system-ui, sans-serif");
    }
    this.drawAxis();
  }

  write(text, x, y, font) {
    this.context.save();
    this.context.fillStyle = this.ink;
    if (font) this.context.font = font;
    this.context.fillText(text, x, y);
    this.context.restore();
  }

  drawPhases({report, timeline, top}) { // forward, backward, and the optimizer's step
    for (const [name, start, duration] of timeline.phases) {
      const box = this.box(start - report.begin, duration, top, LANE.phase - 2);
      if (!box) continue;
      this.context.globalAlpha = name === "backward" ? 0.3 : 0.12;
      this.context.fillStyle = this.ink;
      this.context.fillRect(box.left, box.y, box.width, box.height);
      this.context.globalAlpha = 1;
      if (box.width > this.context.measureText(name).width + 6) this.write(name, box.left + 3, top + LANE.phase / 2 - 0.5);
    }
  }

  drawRank({report, timeline, top: first}) {
    const names = report.data.units.map((unit) => unit.name);
    const top = first + LANE.phase;
    this.drawPhases({report, timeline, top: first});
    for (const [does, unit, start, duration, place] of timeline.spans) {
      const what = report.data.does[does];
      const box = this.box(start - report.begin, duration, top, LANE.compute);
      if (!box) continue;
      this.bar(box, this.fill(what, names[unit]), names[unit]);
      this.writeInside([report.data.places[place] ?? names[unit], names[unit] ?? what], box, what in PALETTE.hatches);
    }
    for (const [kind, unit, start, duration] of timeline.transfers) {
      const y = top + LANE.compute + this.lanes.indexOf(LANE_OF[kind]) * LANE.transfer + 1;
      const box = this.box(start - report.begin, duration, y, LANE.transfer - 2);
      if (box) this.bar(box, this.fill("", names[unit]), names[unit]);
    }
    this.context.globalAlpha = 1;
    this.write(`rank ${timeline.rank}`, 4, top + LANE.compute / 2);
    this.lanes.forEach((name, lane) => this.write(name, 16, top + LANE.compute + (lane + 0.5) * LANE.transfer));
  }

  box(start, duration, y, height) { // what can be seen of it
    const left = Math.max(this.toX(start), LANE.label);
    const right = Math.min(this.toX(start + duration), this.canvas.clientWidth);
    return right < LANE.label || left > this.canvas.clientWidth ? null :
      {left, y, width: Math.max(right - left, 0.6), height};
  }

  bar({left, y, width, height}, fill, name) {
    const isFaint = this.matches !== null ? !this.matches.has(name) : this.chosen !== null && name !== this.chosen;
    this.context.globalAlpha = isFaint ? 0.2 : 1;
    this.context.fillStyle = fill;
    this.context.fillRect(left, y, width, height);
    if (width > 3) { // neighbours of one colour stay two
      this.context.fillStyle = this.ground;
      this.context.fillRect(left + width - 0.5, y, 0.5, height);
    }
  }

  writeInside(texts, {left, y, width, height}, needsGround) { // the first of which a tail has room
    if (width < 20) return;
    const fits = (text) => this.context.measureText(text).width <= width - 6;
    const found = texts.map((text) => tail(text ?? "", fits)).find((text) => text);
    if (!found) return;
    if (needsGround) { // stripes would cross the letters
      this.context.fillStyle = this.ground;
      this.context.fillRect(left + 2, y + 5, this.context.measureText(found).width + 3, height - 10);
    }
    this.context.fillStyle = needsGround ? this.ink : PALETTE.label;
    this.context.fillText(found, left + 3, y + height / 2 - 1);
  }

  fill(does, name) { // a unit has one colour everywhere
    if (does in PALETTE.bars) return PALETTE.bars[does];
    if (!(does in PALETTE.hatches)) return this.colours.get(name) ?? PALETTE.bars.launch;
    if (!this.fills.has(does)) this.fills.set(does, this.hatch(does));
    return this.fills.get(does);
  }

  hatch(does) {
    const tile = element("canvas", undefined, {width: 8, height: 8});
    const pen = tile.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, 8, 8);
    pen.strokeStyle = PALETTE.hatches[does][this.scheme];
    pen.lineWidth = 3;
    for (const [fromX, fromY, toX, toY] of LINES[PALETTE.hatches[does].lines]) {
      pen.moveTo(fromX, fromY);
      pen.lineTo(toX, toY);
    }
    pen.stroke();
    return this.context.createPattern(tile, "repeat");
  }

  drawMemory({report, top, height}) {
    const {context} = this;
    const {rank, times_us: times, series} = this.memoryOf(report.data);
    const y = (nbytes) => top + height - (nbytes / this.most) * height;
    context.save();
    context.beginPath();
    context.rect(LANE.label, top - 1, this.canvas.clientWidth - LANE.label, height + 2);
    context.clip();
    let lower = times.map(() => 0);
    const edges = [...times.map((us) => this.toX(us - report.begin)), this.toX(report.end - report.begin)];
    for (const {what, nbytes} of series) {
      const upper = lower.map((value, i) => value + nbytes[i]);
      context.beginPath();
      upper.forEach((value, i) => { context.lineTo(edges[i], y(value)); context.lineTo(edges[i + 1], y(value)); });
      lower.map((value, i) => [value, i]).reverse().forEach(([value, i]) => {
        context.lineTo(edges[i + 1], y(value));
        context.lineTo(edges[i], y(value));
      });
      context.closePath();
      context.fillStyle = this.seriesColour(what);
      context.fill();
      context.strokeStyle = this.ink; // areas that meet stay apart
      context.lineWidth = 0.7;
      context.stroke();
      lower = upper;
    }
    context.restore();
    this.write("memory", 4, top + height / 2 - 7);
    this.write(`rank ${rank}`, 4, top + height / 2 + 7);
    this.write(size(this.most), 4, top + 6);
    this.write("0", 4, top + height - 6);
  }

  seriesColour(what) {
    return PALETTE.series[this.what.indexOf(what) % PALETTE.series.length];
  }

  drawAxis() {
    const {from, to} = this.view;
    const rough = (to - from) / Math.max(this.canvas.clientWidth / 150, 2);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const text = `${+(at / 1000).toPrecision(6)} ms`;
      const x = this.toX(at);
      this.context.fillStyle = this.ink;
      this.context.fillRect(x, LANE.axis - 6, 1, 4);
      if (x + 3 + this.context.measureText(text).width <= this.canvas.clientWidth) {
        this.write(text, x + 3, LANE.axis / 2 - 1);
      }
    }
  }

  legend() {
    const first = this.reports[0].data.units[0].name;
    const others = new Set(this.reports.flatMap((report) => report.data.does).filter((does) => !["forward", "backward"].includes(does)));
    const keys = ["forward and backward, in the unit's colour", ...others].map((does) =>
      [does, (key) => this.paintKey(key, others.has(does) ? this.fill(does, "") : this.colours.get(first)), WORDS[does]]);
    find("legend").replaceChildren(...keys.map((key) => this.key(...key)));
    const series = this.what.map((what) => [what, (key) => this.paintKey(key, this.seriesColour(what))]);
    find("series").replaceChildren(element("span", "memory:", {class: "faint"}), ...series.map((key) => this.key(...key)));
  }

  key(text, paint, title) {
    const made = element("span", undefined, title ? {title} : {});
    const sample = element("canvas", undefined, {class: "key", width: 18, height: 14});
    paint(sample.getContext("2d"));
    made.append(sample, text);
    return made;
  }

  paintKey(pen, fill) {
    pen.fillStyle = fill;
    pen.fillRect(0, 0, 18, 14);
  }

  // What lies at a point: {text, unit}

  at(x, y) {
    const row = this.rows.find(({top, height}) => top <= y && y < top + height);
    if (!row || row.title || x < LANE.label) return null;
    const moment = this.toTime(x) + row.report.begin;
    return row.memory ? this.memoryAt(row, moment, y) : this.barAt(row, moment, y - row.top - LANE.phase);
  }

  barAt({report: {data}, timeline}, moment, y) {
    const slack = (this.view.to - this.view.from) / this.canvas.clientWidth; // one pixel
    const name = (unit) => data.units[unit]?.name ?? "";
    if (y < 0) {
      const found = timeline.phases.find(([, start, duration]) => start <= moment && moment <= start + duration);
      return found ? {text: `rank ${timeline.rank}: ${found[0]}\n${time(found[2])} from ${time(found[1])}`, unit: ""} : null;
    }
    if (y < LANE.compute) {
      const span = timeline.spans.find(([, , start, duration]) => start <= moment && moment <= start + duration);
      if (!span) return null;
      const [does, unit, start, duration, place] = span;
      const where = data.places[place] ?? name(unit);
      const of = name(unit) && where !== name(unit) ? `\nof unit ${name(unit)}` : "";
      const meaning = WORDS[data.does[does]] ? `\n${WORDS[data.does[does]]}` : "";
      const text = `rank ${timeline.rank}: ${data.does[does]} ${where}${of}\n${time(duration)} from ${time(start)}${meaning}`;
      return {text, unit: name(unit)};
    }
    const lane = Math.floor((y - LANE.compute) / LANE.transfer);
    const found = timeline.transfers.filter(([kind, , start, duration]) =>
      this.lanes.indexOf(LANE_OF[kind]) === lane && start - slack <= moment && moment <= start + duration + slack);
    if (!found.length) return null;
    const lines = found.map(([kind, unit, start, duration, early]) =>
      `rank ${timeline.rank}: ${data.kinds[kind]} ${name(unit)}${early ? ", prefetched" : ""}\n` +
      `${time(duration)} from ${time(start)}`);
    return {text: lines.join("\n"), unit: name(found[0][1])};
  }

  memoryAt({report, top, height}, moment, y) {
    const {times_us: times, series} = this.memoryOf(report.data);
    const position = times.findLastIndex((us) => us <= moment);
    if (position < 0 || moment > report.end) return null;
    const values = series.map((each) => each.nbytes[position]);
    const total = values.reduce((sum, value) => sum + value, 0);
    const level = ((top + height - y) / height) * this.most;
    let below = 0;
    const lines = series.map(({what}, i) => {
      const isHere = below <= level && level < below + values[i];
      below += values[i];
      return values[i] ? `${isHere ? "\u25b8 " : ""}${what}: ${size(values[i])}` : null;
    });
    return {text: [`${time(moment)}: ${size(total)}`, ...lines.filter(Boolean).reverse()].join("\n"), unit: ""};
  }

  // What the reader does

  listen() {
    const {canvas} = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.toTime(event.offsetX));
    }, {passive: false});
    canvas.addEventListener("pointerdown", (event) => { drag = {x: event.offsetX, ...this.view, moved: false}; });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && Math.abs(event.offsetX - drag.x) > 3) {
        drag.moved = true;
        const by = ((event.offsetX - drag.x) / (canvas.clientWidth - LANE.label)) * (drag.to - drag.from);
        this.show(drag.from - by, drag.to - by);
      }
      this.point(event);
    });
    canvas.addEventListener("pointerleave", () => { find("tip").hidden = find("cursor").hidden = true; });
    window.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }); }); // a click comes first
    canvas.addEventListener("click", (event) => {
      const found = drag && drag.moved ? null : this.at(event.offsetX, event.offsetY);
      if (found && found.unit) choose(found.unit);
    });
    const whole = () => this.show(0, this.duration);
    const move = (share) => this.show(...[this.view.from, this.view.to].map((us) => us + share * (this.view.to - this.view.from)));
    const keys = {ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), PageUp: () => move(-0.9), PageDown: () => move(0.9),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: whole, Home: whole};
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own zoom
      event.preventDefault();
      keys[event.key]();
    });
    find("closer").addEventListener("click", () => this.zoom(0.5));
    find("wider").addEventListener("click", () => this.zoom(2));
    find("whole").addEventListener("click", whole);
    find("memory-rank").addEventListener("change", (event) => { this.memoryRank = Number(event.target.value); this.draw(); });
    find("search").addEventListener("input", (event) => this.search(event.target.value.trim()));
    find("search").addEventListener("keydown", (event) => {
      const [first] = this.matches ?? [];
      if (event.key === "Enter" && first) { choose(first); this.showUnit(first); }
    });
  }

  point(event) { // says what is there, and marks the moment on all rows
    const found = this.at(event.offsetX, event.offsetY);
    const tip = find("tip");
    find("cursor").hidden = event.offsetX < LANE.label;
    find("cursor").style.left = `${event.offsetX}px`;
    tip.hidden = found === null;
    if (found === null) return;
    tip.textContent = found.text;
    tip.style.left = `${Math.max(Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8), 0)}px`;
    tip.style.top = `${Math.max(Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8), 0)}px`;
  }

  search(text) {
    this.matches = text ? new Set([...this.colours.keys()].filter((name) => name.includes(text))) : null;
    for (const row of document.querySelectorAll("#units tbody tr, #bytes tbody tr")) {
      row.hidden = this.matches !== null && !this.matches.has(row.dataset.unit);
    }
    this.draw();
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.show(around - (around - this.view.from) * factor, around + (this.view.to - around) * factor);
  }

  show(from, to) {
    const width = Math.min(Math.max(to - from, 5), this.duration);
    const left = Math.min(Math.max(from, 0), this.duration - width);
    this.view = {from: left, to: left + width};
    this.draw();
  }

  showUnit(name) {
    const [{data, begin}] = this.reports;
    const index = data.units.findIndex((unit) => unit.name === name);
    const found = data.timelines[0].spans.filter(([, unit]) => unit === index);
    if (!found.length) return;
    const [, , start, duration] = found.reduce((a, b) => (b[3] > a[3] ? b : a));
    this.show(start - begin - 4 * duration, start - begin + 5 * duration);
  }
}

// The unit that was chosen. ``lists`` are of {heading, fields}, an object each.

function showChosen(name, lists) {
  chart.chosen = name;
  const close = element("button", "close");
  close.addEventListener("click", () => { chart.chosen = null; find("chosen").hidden = true; markChosen(); });
  const parts = lists.flatMap(({heading, fields}) => {
    const list = element("dl");
    for (const [field, value] of Object.entries(fields)) {
      const pair = element("div");
      pair.append(element("dt", label(field)));
      pair.append(element("dd", shown(field, value), {"data-field": field, "data-value": String(value)}));
      list.append(pair);
    }
    return heading ? [element("p", heading, {class: "faint"}), list] : [list];
  });
  find("chosen").replaceChildren(element("b", name, {"data-name": name}), " ", close, ...parts);
  find("chosen").hidden = false;
  markChosen();
}

function markChosen() {
  for (const row of document.querySelectorAll("tr[data-unit]")) {
    row.classList.toggle("chosen", row.dataset.unit === chart.chosen);
  }
  chart.draw();
}

function chooseFromAddress() { // `#unit=NAME`
  const wanted = new URLSearchParams(location.hash.slice(1)).get("unit");
  if (!chart.colours.has(wanted)) return;
  choose(wanted);
  chart.showUnit(wanted);
}

function startPage() { // when the page's own tables are there
  fillWords();
  chart.legend();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.legend());
  chooseFromAddress();
  window.addEventListener("hashchange", chooseFromAddress);
}
