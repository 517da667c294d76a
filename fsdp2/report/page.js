// One report. `#unit=NAME` in the address chooses a unit.

const data = content;
const chart = new Chart(find("timeline"), [reportOf(data)]);

function unitName(index) {
  return index < 0 ? "" : data.units[index].name;
}

function choose(name) {
  const {name: _, ...fields} = data.units.find((unit) => unit.name === name);
  showChosen(name, [{fields}]);
  fillOperators(name);
}

function withCode(text) { // `name` as code
  return text.split("`").map((part, i) => (i % 2 ? element("code", part) : part));
}

function fillFindings() {
  for (const each of data.findings) {
    const item = element("li");
    item.append(element("span", `up to ${ms(each.gain_ms)}: `, {class: "gain"}), ...withCode(each.text));
    find("findings").append(item);
  }
  if (!data.findings.length) find("findings").replaceWith(element("p", "No change is known to make this step shorter."));
}

function fillTables() {
  const isBytes = (field) => field.endsWith("_nbytes") || ["keeps_after_forward", "replicas", "dtype"].includes(field);
  const fields = Object.keys(data.units[0]).filter((each) => !["name", "is_small", "bucket_nbytes"].includes(each));
  const units = (id, some) => table(find(id), ["name", ...some].map(label),
    data.units.map((unit) => Object.assign(cellsOf(unit, ["name", ...some]), {unit: unit.name})));
  units("units", fields.filter((field) => !isBytes(field)));
  units("bytes", fields.filter(isBytes));
  const totals = Object.keys(data.rank_totals[0]).filter((field) => field === "rank" || data.rank_totals.some((rank) => rank[field] > 0));
  table(find("ranks"), totals.map(label), data.rank_totals.map((rank) => cellsOf(rank, totals)));
  const names = new Set(data.units.map((unit) => unit.name));
  const times = ["forward_ms", "backward_ms", "other_ms"];
  table(find("compute"), ["where", ...times.map(label)], data.compute.map((row) =>
    Object.assign(cellsOf(row, ["name", ...times]), {unit: names.has(row.unit) ? row.unit : ""})));
}

function fillOrder() {
  const {ranks, rows, first_difference: difference} = data.collectives;
  const columns = ["collective", "last rank", "later by", ...ranks.map((rank) => `rank ${rank}`)];
  table(find("order"), columns, rows.map(([kind, unit, later, last, ...starts]) => {
    const name = `${data.kinds[kind]} ${unitName(unit)}`;
    const times = [later, ...starts].map((us) => ({value: us, text: (us / 1000).toFixed(3)}));
    const first = {value: name, text: `${data.kinds[kind]} ${shortName(unitName(unit))}`, title: name};
    return Object.assign([first, {value: last, text: String(last)}, ...times], {unit: unitName(unit)});
  }));
  find("order-text").textContent = difference === null
    ? `All ranks ran the same ${rows.length} collectives in the same order. Times, in ms, are those of their starts.`
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
  const {rank, peak_nbytes: peak, allocated_nbytes: allocated, owners, notes} = chart.memoryOf(data);
  const names = new Set(data.units.map((unit) => unit.name));
  table(find("owners"), ["unit", "what", "at the peak"], owners.map((owner) =>
    Object.assign([...cellsOf(owner, ["unit", "what"]), {value: owner.nbytes, text: size(owner.nbytes)}],
      {unit: names.has(owner.unit) ? owner.unit : ""})));
  const first = owners.slice(0, 3).map(({unit, what, nbytes}) =>
    `${unit ? `${what} of ${unit}` : what} (${size(nbytes)})`).join(", ");
  const measured = allocated === null ? "" : ` The device's allocator peaked at ${size(allocated)}.`;
  find("memory-text").textContent = `Rank ${rank} held at most ${size(peak)}: ${first}` +
    `${owners.length > 3 ? ` and ${owners.length - 3} more` : ""}.${measured} ${notes.join(" ")}`.trimEnd();
}

function fillOperators(unit) { // of a unit; of all if it is ""
  const {operators} = data;
  if (operators === null) return;
  const chosen = find("operators-unit");
  if (!chosen.options.length) {
    const options = new Set(operators.rows.map(([, place]) => data.compute[place].unit));
    chosen.append(new Option("the whole step", ""), ...[...options].filter(Boolean).map((name) => new Option(name)));
    chosen.addEventListener("change", () => fillOperators(chosen.value));
    find("operations").hidden = false;
    find("operators-text").textContent = `Rank ${operators.rank}, which computes longest. On an accelerator, operations ` +
      "are kernels; on the CPU, each counts without those that it calls.";
  }
  chosen.value = unit;
  const sums = new Map();
  for (const [name, place, ...values] of operators.rows) {
    if (unit && data.compute[place].unit !== unit) continue;
    sums.set(name, values.map((value, i) => value + (sums.get(name)?.[i] ?? 0)));
  }
  const rows = [...sums].map(([name, [runs, ...us]]) => ({name, runs, total_ms: us.reduce((a, b) => a + b) / 1000,
    forward_ms: us[0] / 1000, backward_ms: us[1] / 1000, other_ms: us[2] / 1000})).sort((a, b) => b.total_ms - a.total_ms);
  const fields = ["runs", "total_ms", "forward_ms", "backward_ms", "other_ms"];
  table(find("operators"), ["operation", ...fields.map(label)], rows.map((row) =>
    [{value: row.name, text: row.name, title: row.name}, ...cellsOf(row, fields)]));
}

fillFindings();
fillPrediction();
fillTables();
fillOrder();
fillMemory();
fillOperators("");
find("memory-rank").addEventListener("change", fillMemory);
startPage();
