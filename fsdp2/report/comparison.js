// Two reports: what differs, and both timelines on one scale.

const {comparison, reports} = content;
const chart = new Chart(find("timeline"), reports.map((data, i) => reportOf(data, comparison.names[i])));

function choose(name) {
  const lists = reports.flatMap((data, i) => data.units.filter((unit) => unit.name === name)
    .map(({name: _, ...fields}) => ({heading: comparison.names[i], fields})));
  showChosen(name, lists);
}

function cellsOfPair({field, values, difference, ratio, is_better: isBetter}) {
  const judged = isBetter === null ? "" : isBetter ? "better" : "worse";
  const text = (value) => (value === null ? "not known" : shown(field, value));
  const by = difference === null ? "" : `${difference > 0 ? "+" : ""}${text(difference)}`;
  return [...values.map((value) => ({value, text: text(value)})), {value: difference, text: `${by} ${judged}`.trim(), class: judged},
    {value: ratio, text: ratio === null ? "" : ratio.toFixed(2)}];
}

function fillDifferences() {
  for (const {title, rows} of comparison.tables) {
    const part = element("div");
    const made = element("table");
    table(made, [title, ...comparison.names.map(shortName), "difference", "ratio"],
      rows.map((row) => [nameCell(label(row.field)), ...cellsOfPair(row)]));
    part.append(made);
    find("differences").append(part);
  }
  const part = element("div");
  const made = element("table");
  table(made, ["settings that differ", ...comparison.names.map(shortName)], comparison.settings.map(({what, units, values}) =>
    [{value: what, text: what, title: units.join("\n")}, ...values.map((value) => ({value: shown("", value), text: shown("", value)}))]));
  part.append(comparison.settings.length ? made : element("p", "No settings differ."));
  find("differences").append(part);
}

function fillUnits() {
  const columns = comparison.unit_fields.flatMap((field) =>
    [...comparison.names.map((name) => `${label(field)}, ${shortName(name)}`), "difference"]);
  table(find("units"), ["name", ...columns], comparison.units.map(({name, pairs}) =>
    Object.assign([nameCell(name), ...pairs.flatMap((pair) => cellsOfPair(pair).slice(0, 3))], {unit: name})));
}

fillDifferences();
fillUnits();
startPage();
