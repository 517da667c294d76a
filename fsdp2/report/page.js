// One report. `#unit=NAME` in the address chooses a unit.

const data = content;
const chart = new Chart(find("timeline"), [reportOf(data)]);

function unitName(index) {
  return index < 0 ? "" : data.units[index].name;
}

function choose(name) {
  const {name: _, ...fields} = data.units.find((unit) => unit.name === name);
  showChosen(name, [{fields}]);
}

function withCode(text) { // `name` as code
  return text.split("`").map((part, i) => (i % 2 ? element("code", part) : part));
}

function fillSummary() {
  find("title").textContent = `${data.model}: one step`;
  const all = data.steps_ms.map((ms) => ms.toFixed(1)).join(", ");
  const some = data.timelines.length < data.ranks.length ? `, ${data.timelines.length} of them drawn` : "";
  find("summary").textContent = `${data.device}; ${data.ranks.length} ranks${some}; ${data.units.length} units; ` +
    `steps of ${all} ms, of which step ${data.step} is shown, counted from 0: ` +
    `${data.steps_ms[data.step].toFixed(1)} ms${speedText(data.speed)}`;
  for (const each of data.findings) {
    const item = element("li");
    item.append(element("span", `up to ${each.gain_ms.toFixed(1)} ms: `, {class: "gain"}), ...withCode(each.text));
    find("findings").append(item);
  }
  if (!data.findings.length) find("findings").replaceWith(element("p", "Nothing: no rule found time to win."));
}

function speedText(speed) { // what is not known is left out
  if (speed.tokens_per_s === null && speed.flops === null) return "";
  const tokens = speed.tokens_per_s === null ? "" : `; ${Math.round(speed.tokens_per_s).toLocaleString("en")} tokens/s`;
  const mfu = speed.mfu === null ? `no MFU: ${speed.no_mfu}` : `MFU ${(100 * speed.mfu).toFixed(1)}% of ${speed.peak}`;
  return `${tokens}; ${mfu}`;
}

function fillLost() {
  const {lost} = data;
  const ms = (value) => `${value.toFixed(1)} ms`;
  find("lost-text").textContent = `Rank ${lost.rank} loses most: of ${ms(lost.step_ms)}, it computes ` +
    `${ms(lost.compute_ms)} and loses ${ms(lost.lost_ms)}. The changes above explain ${ms(lost.explained_ms)} of that.`;
  table(find("lost"), ["lost to", "ms"], lost.kinds.map((each) => cellsOf(each, ["kind", "lost_ms"])));
}

function fillTables() {
  const isBytes = (field) => field.endsWith("_nbytes") || ["keeps_after_forward", "replicas"].includes(field);
  const fields = Object.keys(data.units[0]).filter((each) => !["name", "is_small", "bucket_nbytes"].includes(each));
  const units = (id, some) => table(find(id), ["name", ...some].map(label),
    data.units.map((unit) => Object.assign(cellsOf(unit, ["name", ...some]), {unit: unit.name})));
  units("units", fields.filter((field) => !isBytes(field)));
  units("bytes", fields.filter(isBytes));
  const totals = Object.keys(data.rank_totals[0]);
  table(find("ranks"), totals.map(label), data.rank_totals.map((rank) => cellsOf(rank, totals)));
  const names = new Set(data.units.map((unit) => unit.name));
  table(find("owners"), ["unit", "what", "at the peak"], data.memory.owners.map((owner) =>
    Object.assign([...cellsOf(owner, ["unit", "what"]), {value: owner.nbytes, text: size(owner.nbytes)}],
      {unit: names.has(owner.unit) ? owner.unit : ""})));
  const times = ["forward_ms", "backward_ms", "other_ms"];
  table(find("compute"), ["where", ...times.map(label)], data.compute.map((row) =>
    Object.assign(cellsOf(row, ["name", ...times]), {unit: names.has(row.unit) ? row.unit : ""})));
}

function fillOrder() {
  const {ranks, rows, first_difference: difference} = data.collectives;
  const columns = ["collective", "last rank", "later by, ms", ...ranks.map((rank) => `rank ${rank}, ms`)];
  table(find("order"), columns, rows.map(([kind, unit, later, last, ...starts]) => {
    const name = `${data.kinds[kind]} ${unitName(unit)}`;
    const times = [later, ...starts].map((us) => ({value: us, text: (us / 1000).toFixed(3)}));
    const first = {value: name, text: `${data.kinds[kind]} ${shortName(unitName(unit))}`, title: name};
    return Object.assign([first, {value: last, text: String(last)}, ...times], {unit: unitName(unit)});
  }));
  find("order-text").textContent = difference === null
    ? `All ranks ran the same ${rows.length} collectives in the same order. Times are those of their starts.`
    : `The ranks differ at position ${difference.position}: ` +
      Object.entries(difference.by_rank).map(([rank, name]) => `rank ${rank} has ${name}`).join("; ") + ".";
}

function fillPrediction() { // what the plan said
  const prediction = data.prediction;
  if (prediction === null) return;
  find("predicted").hidden = false;
  const machine = `${prediction.num_gpus} x ${prediction.machine}`;
  find("prediction-text").replaceChildren(
    `The plan chose ${prediction.choice}, for ${prediction.workload}. `,
    element("b", `It predicts the times of ${machine}.`),
    ` They were measured on ${data.device}` +
      (prediction.same_machine ? "." : ", which is another machine: they are not compared."));
  const text = (figure, value) => (value === null ? "not known" : shown(figure, value));
  table(find("prediction"), ["figure", `predicted for ${machine}`, "measured", "measured / predicted"],
    prediction.rows.map(({figure, predicted, measured, ratio}) =>
      [{value: figure, text: label(figure)}, {value: predicted, text: text(figure, predicted)},
        {value: measured, text: text(figure, measured)},
        {value: ratio, text: ratio === null ? "" : ratio.toFixed(2)}]));
}

function fillMemory() {
  const {rank, peak_nbytes: peak, allocated_nbytes: allocated, owners, notes} = data.memory;
  const first = owners.slice(0, 3).map(({unit, what, nbytes}) =>
    `${unit ? `${what} of ${unit}` : what} (${size(nbytes)})`).join(", ");
  const measured = allocated === null ? "" : ` The device's allocator peaked at ${size(allocated)}.`;
  find("memory-text").textContent = `Rank ${rank} held at most ${size(peak)}: ${first}` +
    `${owners.length > 3 ? ` and ${owners.length - 3} more` : ""}.${measured} ${notes.join(" ")}`.trimEnd();
}

fillSummary();
fillPrediction();
fillLost();
fillTables();
fillOrder();
fillMemory();
startPage();
