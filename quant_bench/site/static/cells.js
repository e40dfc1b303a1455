"use strict";
// The board's numbers as elements, for the leaderboard and the comparison.
(() => {
  const site = window.quantBench;
  const { make, number, signed, between, board } = site;

  const names = ["key", "model", "arm", "label", "execution", "bits", "seeds", "numbers"];
  board.rows = board.rows.map((row) => Object.fromEntries(names.map((name, index) => [name, row[index]])));
  for (const row of board.rows) row.name = `${row.label} · ${row.execution} · ${row.arm}`;

  const line = (text, name = "line") => make("span", { class: name }, text);
  const withEnds = ([value, low, high], show) => show(value) + (low === null || high === null ? "" : ` ${between(low, high, show)}`);
  const difference = (sign, found, seeds) =>
    `${sign} ${withEnds(found, signed)}` + (found[3] === seeds ? "" : ` (${found[3]} of ${seeds} seeds)`);

  // lines of a number, the same as in the other reports
  site.lines = (cell) => {
    if (cell.s) return [cell.s.replace("_", " ")];
    const seeds = cell.v[3];
    const all = seeds + (cell.lost || 0);
    const lines = [withEnds(cell.v, number) + (all === 1 ? "" : ` ${seeds}${seeds < all ? ` of ${all}` : ""} seeds`)];
    if (cell.d) lines.push(difference("Δ", cell.d, seeds));
    if (cell.a) lines.push(difference("vs softmax", cell.a, seeds));
    return lines;
  };

  site.records = (cell) => cell.p.map((index) => {
    const [path, command] = board.records[index];
    return [site.recordLink(path), command];
  });

  const meaning = {
    [board.signs.uninformative]: "uninformative: the float model is at chance",
    [board.signs.beats]: "better than the float model beyond its interval: look for the reason before believing it",
    [board.signs.unranked]: "not ranked: an older version of the plugin, another number of items, or another unit",
  };

  site.explainCell = (row, column, cell) => {
    const facts = [
      ["model", board.models[row.model].title],
      ["row", `${row.label} · ${row.execution} · ${row.arm} · ${row.bits}`],
      ["question", column.question],
      ["number", site.lines(cell).join("; ")],
      ["exactly", cell.v && cell.v[3] === 1 ? String(cell.v[0]) : ""],
      ["items", cell.n ? cell.n.toLocaleString("en") : ""],
      ["rank", cell.r ? `${cell.r} among its model's rows${cell.best ? "; its interval says that it is the best" : ""}` : ""],
      ["mark", [...(cell.m || "")].map((mark) => meaning[mark]).join("; ")],
      ["reason", cell.why],
    ];
    site.explain(column.heading, facts, site.records(cell));
  };

  site.cell = (row, column, cell, brief = false) => {
    if (!cell) return line("–", "none");
    const [first, ...others] = brief ? site.lines(cell).slice(0, 1) : site.lines(cell);
    const top = line("", "line main");
    if (cell.s) top.append(first);
    else {
      const shown = number(cell.v[0]);
      top.append(cell.best ? make("span", { class: "best" }, shown) : shown);
      if (cell.m) top.append(make("span", { class: "marks" }, cell.m));
      top.append(line(first.slice(shown.length), "interval"));
    }
    const link = make("a", { class: cell.s ? "number state" : "number", href: site.records(cell)[0][0] }, top);
    link.append(...others.map((text) => line(text)));
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      site.explainCell(row, column, cell);
    });
    return link;
  };
})();
