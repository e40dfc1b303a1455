"use strict";
// What every page has: the theme, numbers as the command line writes them, and the window with a number's origin.
(() => {
  const site = window.quantBench;
  site.root = document.body.dataset.root;

  // --- elements; text is always set as text, never as markup
  site.make = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === true) made.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };

  site.recordLink = (path) => site.root + "records/" + path.split("/").map(encodeURIComponent).join("/");

  // --- numbers: four significant digits or so, the same text as quant_bench.report.text.number
  // toFixed and toExponential round what lies exactly in the middle up; Python rounds it to the even digit
  const fixed = (value, digits) => {
    const shown = value.toFixed(digits);
    const exact = Math.abs(value).toFixed(Math.min(100, digits + 70));
    const cut = exact.length - (Math.min(100, digits + 70) - digits);
    if (!/^50*$/.test(exact.slice(cut))) return shown;
    const down = exact.slice(0, cut).replace(/\.$/, "");
    return Number(down.at(-1)) % 2 === 0 ? (value < 0 ? "-" : "") + down : shown;
  };
  const exponential = (value) => {
    const [, down, rest, power] = value.toExponential(60).match(/^(-?\d\.\d\d)(\d*)(e.*)$/);
    return /^50*$/.test(rest) && Number(down.at(-1)) % 2 === 0 ? down + power : value.toExponential(2);
  };
  const grouped = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  site.number = (value) => {
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return grouped(String(value === 0 ? 0 : value));
    if (size >= 1e7 || size < 1e-3) return exponential(value).replace(/e([+-])(\d)$/, "e$10$2");
    if (size >= 1000) return grouped(fixed(value, 0));
    return fixed(value, size >= 10 ? 2 : size >= 1 ? 3 : 4);
  };
  site.signed = (value) => (value > 0 ? "+" : "") + site.number(value);
  site.between = (low, high, show = site.number) => `[${show(low)}, ${show(high)}]`;

  // --- theme
  const themes = ["auto", "light", "dark"];
  const button = document.getElementById("theme");
  const current = () => document.documentElement.dataset.theme || "auto";
  const label = () => { button.textContent = `Theme: ${current()}`; };
  button.hidden = false;
  label();
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(current()) + 1) % themes.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("quant-bench-theme", next);
    } catch {
      // it holds for this page only
    }
    label();
    document.dispatchEvent(new Event("themechange"));
  });

  // --- where a number comes from
  const detail = document.getElementById("detail");
  const body = document.getElementById("detail-body");
  document.getElementById("detail-close").addEventListener("click", () => detail.close());
  detail.addEventListener("click", (event) => { if (event.target === detail) detail.close(); });

  // facts: pairs of a name and a text; records: pairs of an address and a command
  site.explain = (title, facts, records) => {
    document.getElementById("detail-title").textContent = title;
    const list = site.make("dl");
    for (const [name, text] of facts) if (text) list.append(site.make("dt", {}, name), site.make("dd", {}, text));
    body.replaceChildren(list, ...records.map(origin));
    detail.showModal();
  };
  const origin = ([href, command], index, all) => {
    const name = all.length > 1 ? `Record ${index + 1} of ${all.length}` : "Record";
    const copy = site.make("button", { type: "button" }, "Copy command");
    copy.addEventListener("click", () => copied(copy, command));
    const link = site.make("a", { href, class: "record" }, `${name} (JSON)`);
    return site.make("div", { class: "origin" }, link, site.make("pre", {}, command), copy);
  };
  const copied = async (copy, command) => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    } catch {
      // a page from the disk may not write to the clipboard everywhere: select the text instead
      getSelection().selectAllChildren(copy.previousElementSibling);
      copy.textContent = "Selected: copy it now";
    }
  };

  // numbers of pages that are made without scripts
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-records]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    const said = link.dataset;
    const lines = [...link.querySelectorAll(".line")].map((line) => line.innerText);
    const facts = [
      ["row", said.row],
      ["number", (lines.length ? lines : [link.innerText]).join("\n")],
      ["question", said.question],
      ["reason", said.why],
    ];
    site.explain(said.title, facts, JSON.parse(said.records).map(([href, command]) => [site.root + href, command]));
  });
})();
