"use strict";
// Two rows side by side, with a paired interval wherever a record holds one.
(() => {
  const site = window.quantBench;
  const { make, number, signed, between, board } = site;
  const $ = (id) => document.getElementById(id);
  if (!board || !board.rows.length) return;
  const byKey = new Map(board.rows.map((row) => [row.key, row]));

  const fill = (select) => {
    board.models.forEach((model, index) => {
      const group = make("optgroup", { label: model.title });
      for (const row of board.rows) if (row.model === index) group.append(make("option", { value: row.key }, row.name));
      if (group.children.length) select.append(group);
    });
  };
  const isFloat = (row) => row.execution === "float";
  const sameSeeds = (a, b) => a.seeds.join() === b.seeds.join();

  // what a stored difference must be, up to rounding, to be one of these two numbers
  const agrees = (stored, plain, x, y) => Math.abs(stored - plain) <= 1e-9 * Math.max(Math.abs(x), Math.abs(y), Math.abs(plain));

  // the stored difference that says how `a` differs from `b`, or null
  const stored = (a, b, of) => {
    if (a.arm === b.arm && isFloat(b) && !isFloat(a)) return of.d || null;
    if (b.arm === "softmax" && a.arm !== "softmax" && a.label === b.label && a.execution === b.execution) return of.a || null;
    return null;
  };
  const reversed = (found) => found && [-found[0], found[2] === null ? null : -found[2], found[1] === null ? null : -found[1], found[3]];
  const paired = (a, b, column) => site.pairs[column][`${a.key} ${b.key}`] || null;
  const difference = (a, b, column) => {
    const [x, y] = [a.numbers[column], b.numbers[column]];
    if (!x?.v || !y?.v) return [null, null, null, x && y ? "a cell has no score" : "only one row was asked"];
    if (a.model !== b.model) return [null, null, null, "not compared: other weights or precision"];
    const plain = x.v[0] - y.v[0];
    if (x.n !== y.n) return [null, null, null, "not compared: other item counts"];
    const given = paired(a, b, column) || reversed(paired(b, a, column));
    if (given && (given[3] < x.v[3] || given[3] < y.v[3])) {
      const seeds = given[3] > 1 ? `over the ${given[3]} seeds` : "over items, of the one seed";
      return [given[0], given[1], given[2], `paired, 95 % ${seeds} that both have`];
    }
    // a record's own difference first, then what the site was given of any two rows; one of fewer seeds is another one
    const known = [stored(a, b, x), reversed(stored(b, a, y)), given];
    const found = known.find((one) => one && one[3] === x.v[3] && one[3] === y.v[3]);
    if (found && agrees(found[0], plain, x.v[0], y.v[0])) {
      if (found[1] === null) return [plain, null, null, "the records have this difference without an interval"];
      return [found[0], found[1], found[2], found[3] > 1 ? `paired, 95 % over ${found[3]} seeds` : "paired, 95 % over items"];
    }
    // seeds of a row are those of all its numbers
    if (x.v[3] !== y.v[3] || !sameSeeds(a, b)) return [plain, null, null, "other seeds: no paired interval"];
    return [plain, null, null, found ? "the stored difference is one to another cell: measure both again" : "no paired interval is known here"];
  };

  const draw = () => {
    const [a, b] = [byKey.get($("first").value), byKey.get($("second").value)];
    history.replaceState(null, "", `#a=${a.key}&b=${b.key}`);
    const heads = ["metric", "A", "B", "A − B", "95 % interval", "what it is"];
    $("table").tHead.replaceChildren(make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
    const rows = [];
    let [shared, asked] = [0, null];
    board.columns.forEach((column, index) => {
      const [x, y] = [a.numbers[index], b.numbers[index]];
      if (!x && !y) return;
      shared += Boolean(x && y);
      if (column.question !== asked) {
        asked = column.question;
        rows.push(make("tr", { class: "between" }, make("th", { scope: "colgroup", colspan: heads.length }, make("span", {}, asked))));
      }
      const [value, low, high, how] = difference(a, b, index);
      const cells = [
        make("th", { scope: "row" }, column.heading),
        make("td", {}, site.cell(a, column, x, true)),
        make("td", {}, site.cell(b, column, y, true)),
        make("td", { class: "difference" }, value === null ? "–" : signed(value)),
        make("td", { class: "ends" }, low === null || high === null ? "–" : between(low, high, signed)),
        make("td", { class: "prose quiet" }, how),
      ];
      rows.push(make("tr", {}, ...cells));
    });
    $("table").tBodies[0].replaceChildren(...rows);
    const title = (row) => `${row.name} of ${board.models[row.model].title}`;
    $("status").textContent = a === b ? "A and B are one row." : `A: ${title(a)}. B: ${title(b)}. ${shared} numbers of both.`;
  };

  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const first = board.rows.find((row) => isFloat(row)) || board.rows[0];
    const [a, b] = [given.get("a"), given.get("b")];
    $("second").value = byKey.has(b) ? b : first.key;
    const other = board.rows.find((row) => row !== first && row.model === first.model) || first;
    $("first").value = byKey.has(a) ? a : other.key;
    draw();
    if ([a, b].some((key) => key !== null && !byKey.has(key))) $("status").prepend("The address names a row that is not here. ");
  };
  fill($("first"));
  fill($("second"));
  for (const name of ["first", "second"]) $(name).addEventListener("change", draw);
  $("swap").addEventListener("click", () => {
    [$("first").value, $("second").value] = [$("second").value, $("first").value];
    draw();
  });
  addEventListener("hashchange", read);
  $("pair").hidden = false;
  read();
})();
