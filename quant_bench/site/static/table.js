"use strict";
// The leaderboard: filters, sorting, a choice of columns, and only the rows in sight as elements.
(() => {
  const site = window.quantBench;
  const { make, board } = site;
  const $ = (id) => document.getElementById(id);
  if (!board || !board.rows.length) return;

  const AT_ONCE = 150; // so many rows are all made, which lets the browser search and print them
  const BESIDE = 12;
  const facets = {
    model: ["Model", (row) => board.models[row.model].name],
    arm: ["Arm", (row) => row.arm],
    quantizer: ["Quantizer", (row) => row.label],
    bits: ["Bits", (row) => row.bits],
    execution: ["Execution", (row) => row.execution],
    task: ["Task", null],
  };
  // a name that stands for one model only needs no digest beside it
  const names = board.models.map((model) => model.name);
  const titles = board.models.map((model) => (names.filter((name) => name === model.name).length > 1 ? model.title : model.name));
  const plain = {
    model: ["model", (row) => titles[row.model]],
    arm: ["arm", (row) => row.arm],
    execution: ["execution", (row) => row.execution],
    bits: ["bits", (row) => row.bits],
  };
  const byKey = new Map(board.columns.map((column, index) => [column.key, index]));
  const usual = board.columns.flatMap((column, index) => (column.shown ? [index] : []));
  const usualPlain = Object.keys(plain).filter((name) => name !== "arm" || Object.keys(board.arms).length > 1)
    .filter((name) => name !== "bits");
  let [hasArms, lines] = [false, 1];
  for (const row of board.rows) {
    for (const cell of Object.values(row.numbers)) {
      hasArms ||= Boolean(cell.a);
      lines = Math.max(lines, 1 + Boolean(cell.d) + Boolean(cell.a));
    }
    row.text = [board.models[row.model].title, row.arm, row.label, row.execution, row.bits].join(" ").toLowerCase();
  }

  let state;
  let shown = [];
  const fresh = () => ({
    only: Object.fromEntries(Object.keys(facets).map((name) => [name, new Set()])),
    text: "", sort: null, down: false, by: "v", across: false, columns: new Set(usual), plain: new Set(usualPlain), picked: [],
  });

  // --- the address keeps everything that a reader chose
  const read = () => {
    state = fresh();
    const given = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(facets)) state.only[name] = new Set(given.getAll(name));
    state.text = given.get("search") || "";
    if (["v", "d", "a"].includes(given.get("by"))) state.by = given.get("by");
    state.across = given.has("across");
    const sort = given.get("sort") || "";
    state.down = sort.startsWith("-");
    const name = sort.replace(/^-/, "");
    if (byKey.has(name) || Object.hasOwn(plain, name) || name === "quantizer") state.sort = name;
    if (given.has("columns")) {
      const wanted = given.get("columns").split(",");
      state.columns = new Set(wanted.filter((key) => byKey.has(key)).map((key) => byKey.get(key)));
      state.plain = new Set(wanted.filter((key) => Object.hasOwn(plain, key)));
    }
    const known = new Set(board.rows.map((row) => row.key));
    state.picked = given.getAll("row").filter((key) => known.has(key)).slice(0, 2);
  };
  const write = () => {
    const said = new URLSearchParams();
    for (const name of Object.keys(facets)) for (const value of state.only[name]) said.append(name, value);
    if (state.text) said.set("search", state.text);
    if (state.by !== "v") said.set("by", state.by);
    if (state.across) said.set("across", "");
    if (state.sort) said.set("sort", (state.down ? "-" : "") + state.sort);
    const same = (set, list) => set.size === list.length && list.every((one) => set.has(one));
    if (!same(state.columns, usual) || !same(state.plain, usualPlain)) {
      said.set("columns", [...state.plain, ...[...state.columns].map((index) => board.columns[index].key)].join(","));
    }
    for (const key of state.picked) said.append("row", key);
    const hash = said.toString();
    if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  };

  // --- which rows, in which order
  const columnsShown = () => board.columns.map((_, index) => index)
    .filter((index) => state.columns.has(index))
    .filter((index) => !state.only.task.size || state.only.task.has(board.columns[index].task));
  const chosen = () => {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = Object.entries(facets).filter(([name, [, of]]) => of && state.only[name].size);
    const asked = state.only.task.size
      ? board.columns.flatMap((column, index) => (state.only.task.has(column.task) ? [index] : [])) : null;
    return board.rows.filter((row) =>
      tests.every(([name, [, of]]) => state.only[name].has(of(row))) &&
      words.every((word) => row.text.includes(word)) &&
      (!asked || asked.some((index) => index in row.numbers)));
  };
  const keyOf = () => {
    if (byKey.has(state.sort)) {
      const index = byKey.get(state.sort);
      return (row) => row.numbers[index]?.[state.by]?.[0];
    }
    return state.sort === "quantizer" ? (row) => row.label : plain[state.sort][1];
  };
  const usualColumn = usual.find((index) => board.columns[index].better !== "neither");
  const ordered = (rows) => {
    const first = new Map(board.rows.map((row, index) => [row, index]));
    let of = (row) => row.numbers[usualColumn]?.r;
    if (state.sort) of = keyOf();
    const sign = state.sort && state.down ? -1 : 1;
    const keys = new Map(rows.map((row) => [row, of(row)]));
    return rows.sort((a, b) => {
      if (!state.across && a.model !== b.model) return a.model - b.model;
      const [x, y] = [keys.get(a), keys.get(b)];
      // what is not there comes last in both directions
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined) || first.get(a) - first.get(b);
      const order = typeof x === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0;
      return sign * order || first.get(a) - first.get(b);
    });
  };

  // --- the head
  const scroller = $("scroller");
  const [head, body] = [$("table").tHead, $("table").tBodies[0]];
  const sortable = (name, text, small, extra) => {
    const active = state.sort === name;
    const mark = active ? (state.down ? " ▼" : " ▲") : "";
    // long names of metrics may break behind an underscore
    const parts = text.split("_").flatMap((part, index, all) => (index < all.length - 1 ? [`${part}_`, make("wbr")] : [part]));
    const press = make("button", { type: "button", "data-sort": name }, ...parts, mark);
    press.addEventListener("click", () => {
      // a metric starts with its best end
      const best = byKey.has(name) && board.columns[byKey.get(name)].better === "higher";
      if (!active) [state.sort, state.down] = [name, best];
      else if (state.down === best) state.down = !best;
      else [state.sort, state.down] = [null, false];
      update();
      head.querySelector(`[data-sort="${CSS.escape(name)}"]`)?.focus();
    });
    return make("th", { scope: "col", "aria-sort": active ? (state.down ? "descending" : "ascending") : null, ...extra },
      press, small ? make("small", {}, small) : null);
  };
  const drawHead = () => {
    const row = make("tr", { "aria-rowindex": 1 });
    row.append(sortable("quantizer", "quantizer", null, { class: "pin" }));
    for (const name of Object.keys(plain)) if (state.plain.has(name)) row.append(sortable(name, plain[name][0], null, { class: name }));
    for (const index of columnsShown()) {
      const column = board.columns[index];
      row.append(sortable(column.key, column.heading, column.question, { class: "wide" }));
    }
    head.replaceChildren(row);
  };

  // --- the body: rows in sight, and room for the others
  const drawRow = (row, index) => {
    const picked = state.picked.includes(row.key);
    const made = make("tr", { "aria-rowindex": index + 2, class: picked ? "picked" : null, "data-row": row.key });
    const pick = make("input", { type: "checkbox", class: "pick", "aria-label": `Compare ${row.name}` });
    pick.checked = picked;
    pick.addEventListener("change", () => {
      state.picked = pick.checked ? [...state.picked, row.key].slice(-2) : state.picked.filter((key) => key !== row.key);
      pickedChanged();
    });
    made.append(make("th", { scope: "row", class: "pin" }, make("span", { class: "clip", title: row.label }, pick, ` ${row.label}`),
      make("small", { class: "beneath" }, row.execution)));
    for (const name of Object.keys(plain)) if (state.plain.has(name)) made.append(make("td", { class: name }, plainCell(name, row)));
    for (const column of columnsShown()) made.append(make("td", {}, site.cell(row, board.columns[column], row.numbers[column])));
    return made;
  };
  const plainCell = (name, row) => {
    const text = plain[name][1](row);
    const page = name === "model" ? board.models[row.model].page : name === "arm" ? board.arms[text] : null;
    return page ? make("a", { href: site.root + page, class: "clip", title: text }, text) : make("span", { class: "clip" }, text);
  };
  const space = (rows, span) => make("tr", { class: "space", "aria-hidden": "true", style: `height:${rows * height()}px` },
    make("td", { colspan: span }));
  const height = () => Math.round(lines * 19 + 14);
  let drawn = [-1, -1];
  const drawBody = (force) => {
    const all = shown.length <= AT_ONCE || document.documentElement.dataset.printing === "all";
    const top = Math.floor(scroller.scrollTop / height());
    const from = all ? 0 : Math.max(0, Math.min(top - BESIDE, shown.length - 1));
    const to = all ? shown.length : Math.min(shown.length, top + Math.ceil(scroller.clientHeight / height()) + BESIDE);
    if (!force && from === drawn[0] && to === drawn[1]) return;
    drawn = [from, to];
    const focus = document.activeElement?.closest?.("#table tbody tr")?.dataset.row;
    const place = focus ? [...document.activeElement.closest("tr").querySelectorAll("a, input")].indexOf(document.activeElement) : -1;
    const span = 1 + state.plain.size + columnsShown().length;
    const rows = shown.slice(from, to).map((row, index) => drawRow(row, from + index));
    body.replaceChildren(...(from ? [space(from, span)] : []), ...rows, ...(to < shown.length ? [space(shown.length - to, span)] : []));
    if (focus) body.querySelector(`tr[data-row="${focus}"]`)?.querySelectorAll("a, input")[place]?.focus({ preventScroll: true });
  };

  const pickedChanged = () => {
    write();
    for (const row of body.rows) {
      const picked = state.picked.includes(row.dataset.row);
      row.classList.toggle("picked", picked);
      const box = row.querySelector(".pick");
      if (box) box.checked = picked;
    }
    const link = $("compare");
    const two = state.picked.length === 2;
    link.setAttribute("aria-disabled", String(!two));
    if (two) link.href = `compare.html#a=${state.picked[0]}&b=${state.picked[1]}`;
    else link.removeAttribute("href");
    link.textContent = two ? "Compare the two rows" : `Compare two rows (${state.picked.length} of 2 chosen)`;
  };

  const update = () => {
    shown = ordered(chosen());
    write();
    $("table").setAttribute("aria-rowcount", shown.length + 1);
    scroller.style.setProperty("--row", `${height()}px`);
    drawHead();
    drawBody(true);
    pickedChanged();
    const count = (n) => n.toLocaleString("en");
    $("status").textContent = shown.length
      ? `${count(shown.length)} of ${count(board.rows.length)} rows, ${columnsShown().length} of ${board.columns.length} number columns`
      : `None of ${count(board.rows.length)} rows fits the filters.`;
    for (const [name, set] of Object.entries(state.only)) mark(name, set.size);
    mark("columns", 0);
  };

  // --- the tools
  const marks = {};
  const mark = (name, count) => {
    marks[name].parentElement.classList.toggle("active", count > 0);
    marks[name].textContent = marks[name].dataset.name + (count ? ` (${count})` : "");
  };
  const drop = (name, title, entries) => {
    const summary = make("summary", { "data-name": title }, title);
    marks[name] = summary;
    const list = make("fieldset", {}, make("legend", { class: "unseen" }, title));
    for (const [value, text, small, checked, change] of entries) {
      const box = make("input", { type: "checkbox", value });
      box.checked = checked;
      box.addEventListener("change", () => { change(box.checked); update(); });
      list.append(make("label", {}, box, ` ${text}`, small ? make("small", {}, small) : null));
    }
    return make("details", { class: "facet", "data-facet": name }, summary, list);
  };
  const put = (set, value, inside) => (inside ? set.add(value) : set.delete(value));
  const tools = () => {
    const made = Object.entries(facets).map(([name, [title, of]]) => {
      const values = new Set(of ? board.rows.map(of) : board.columns.map((column) => column.task));
      // a value of a stale address stays where it can be unticked
      for (const value of state.only[name]) values.add(value);
      const sorted = [...values].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      return drop(name, title, sorted.map((value) =>
        [value, value, null, state.only[name].has(value), (on) => put(state.only[name], value, on)]));
    });
    const words = Object.entries(plain).map(([name, [text]]) =>
      [name, text, null, state.plain.has(name), (on) => put(state.plain, name, on)]);
    const numbers = board.columns.map((column, index) =>
      [column.key, `${column.task}: ${column.heading}`, column.question, state.columns.has(index), (on) => put(state.columns, index, on)]);
    $("facets").replaceChildren(...made, drop("columns", "Columns", [...words, ...numbers]));
    $("search").value = state.text;
    $("by").value = state.by;
    $("across").checked = state.across;
  };
  document.addEventListener("click", (event) => {
    for (const one of document.querySelectorAll(".facet[open]")) if (!one.contains(event.target)) one.open = false;
  });
  document.addEventListener("keydown", (event) => {
    const open = event.key === "Escape" && document.querySelector(".facet[open]");
    if (open) { open.open = false; open.querySelector("summary").focus(); }
  });
  $("search").addEventListener("input", (event) => { state.text = event.target.value; update(); });
  $("by").addEventListener("change", (event) => { state.by = event.target.value; update(); });
  $("across").addEventListener("change", (event) => { state.across = event.target.checked; update(); });
  $("reset").addEventListener("click", () => { state = fresh(); tools(); update(); });
  $("by").querySelector('[value="a"]').hidden = !hasArms;

  let waiting = false;
  scroller.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawBody(false); });
  }, { passive: true });
  addEventListener("resize", () => drawBody(false));
  addEventListener("beforeprint", () => { document.documentElement.dataset.printing = "all"; drawBody(true); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.printing; drawBody(true); });
  addEventListener("hashchange", () => { read(); tools(); update(); });

  $("board").hidden = false;
  read();
  tools();
  update();
})();
