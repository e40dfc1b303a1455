"use strict";
// Figures: lists to choose from, a plot, and the same numbers as a table.
(() => {
  const site = window.quantBench;
  const { make, number } = site;

  // told apart without colour, too: every series has a shape of its own (colours: Okabe and Ito 2008)
  const PALETTES = {
    light: ["#0072b2", "#d55e00", "#00795a", "#a8518a", "#9a6b00", "#2f7fb0"],
    dark: ["#6db8ec", "#f0883e", "#3fc79a", "#e39bc6", "#e8b84a", "#9bd0f5"],
  };
  // one shape more than colours: no two of 42 series have both in common
  const SHAPES = ["circle", "diamond-open", "square", "triangle-up-open", "x", "cross", "star-triangle-down-open"];
  const SIZES = [8, 14, 9, 13, 10, 11, 13];

  // the plotting library reads tags and entities in every text
  const escaped = (value) => {
    if (typeof value === "string") return value.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
    return Array.isArray(value) ? value.map(escaped) : value;
  };
  // broken into lines before it is escaped, so that no entity is cut
  const wrapped = (text, width) => {
    const lines = [""];
    for (const word of text.split(/\s+/)) {
      if (lines.at(-1) && lines.at(-1).length + word.length >= width) lines.push("");
      lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
    }
    return lines.map(escaped).join("<br>");
  };

  const probe = make("span", { hidden: true });
  document.body.append(probe);
  const color = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const isDark = () => {
    const [red] = color("ground").match(/\d+/g).map(Number);
    return red < 128;
  };

  // a mark of an axis is round: 0.2 and not 0.2000
  const mark = (value) => (String(value).length <= 5 && Math.abs(value) < 1000 ? String(value) : number(value));
  const marked = (values) => ({ tickmode: "array", tickvals: values, ticktext: values.map(mark) });

  // `longest` is of a category's name; 0 for an axis of numbers
  const axis = (title, log, order, longest, values) => {
    const made = {
      title: { text: wrapped(title, innerWidth < 600 ? 34 : 60), standoff: 12 }, automargin: true, gridcolor: color("line"), zerolinecolor: color("line"),
      linecolor: color("line"), tickcolor: color("line"),
    };
    if (longest) {
      // the whole name stands in the table and under the pointer: below the axis it would take the plot's place
      const shown = order.map((name) => escaped(name.length > longest ? `${name.slice(0, longest - 1)}…` : name));
      Object.assign(made, { type: "category", categoryorder: "array", categoryarray: escaped(order), tickmode: "array", tickvals: escaped(order), ticktext: shown });
    } else made.type = log ? "log" : "linear";
    if (log) Object.assign(made, marked(powers(values)));
    return made;
  };

  // marks of a logarithmic axis: powers of ten, and within three of them 2 and 5 times these
  const powers = (values) => {
    const known = values.filter((value) => value > 0);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const steps = high / low < 1000 ? [1, 2, 5] : [1];
    const found = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.log10(high) + 1; power += 1) {
      for (const step of steps) found.push(Number((step * 10 ** power).toPrecision(1)));
    }
    return found;
  };

  const ends = (at, low, high) => ({
    type: "data", symmetric: false, thickness: 1.3, width: 4,
    array: at.map((value, index) => (high[index] === null ? null : high[index] - value)),
    arrayminus: at.map((value, index) => (low[index] === null ? null : value - low[index])),
  });

  const seriesPlot = (choice) => {
    const palette = PALETTES[isDark() ? "dark" : "light"];
    const labelled = new Set();
    const traces = choice.series.map((series, index) => {
      const measured = series.low.some((end) => end !== null);
      const made = {
        type: "scatter", mode: series.line ? "lines+markers" : "markers", name: escaped(series.name),
        x: escaped(series.x), y: escaped(series.y), customdata: series.path,
        text: series.text.map((text, at) => {
          const value = choice.across ? series.x[at] : series.y[at];
          const range = series.low[at] === null || series.high[at] === null ? "" : ` ${site.between(series.low[at], series.high[at])}`;
          return [text, `${choice.across ? series.y[at] : series.x[at]}: ${number(value)}${range}`].filter(Boolean).map(escaped).join("<br>");
        }),
        hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
        marker: { symbol: SHAPES[index % SHAPES.length], size: SIZES[index % SIZES.length], color: palette[index % palette.length], line: { width: 1.5 } },
        line: { color: palette[index % palette.length], width: 1.5 },
      };
      if (!series.path.some(Boolean)) {
        // a line through points that have names of their own: its names stand on the side where no point can be
        const free = series.y.at(-1) > series.y[0] ? "top left" : "bottom left";
        const beside = series.y.map((_, at) => (at ? free : "top right"));
        Object.assign(made, {
          mode: "lines+markers+text", text: escaped(series.label), textposition: beside, cliponaxis: false, hoverinfo: "skip", hovertemplate: null,
          // unseen, and names keep away from it
          marker: { size: 14, color: "rgba(0, 0, 0, 0)" },
          line: { color: color("quiet"), width: 1.5, dash: "dot" },
        });
        return made;
      }
      // twins of one place need one name
      const label = series.label.map((text, at) => {
        const place = `${series.x[at]} ${series.y[at]} ${text}`;
        return text && !labelled.has(place) && labelled.add(place) ? text : "";
      });
      if (label.some(Boolean)) {
        // what is shown and what is asked for are one text in the plotting library, but for the template
        Object.assign(made, { mode: "markers+text", hovertext: made.text, text: escaped(label), textposition: "top right", cliponaxis: false, hovertemplate: "%{hovertext}<extra>%{fullData.name}</extra>" });
      }
      if (measured) made[choice.across ? "error_x" : "error_y"] = { ...ends(choice.across ? series.x : series.y, series.low, series.high), color: made.line.color };
      return made;
    });
    const text = choice.order.length > 0;
    const layout = {
      xaxis: axis(choice.x, choice.log.includes("x"), choice.order, text && !choice.across ? 24 : 0, choice.series.flatMap((one) => one.x)),
      yaxis: axis(choice.y, choice.log.includes("y"), choice.order, text && choice.across ? 60 : 0, choice.series.flatMap((one) => one.y)),
      showlegend: traces.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      height: choice.across ? 140 + 34 * choice.order.length : 440,
    };
    // curves over a few chosen values, such as doses, have their marks there
    const chosen = [...new Set(choice.series.flatMap((one) => one.x))];
    if (!text && chosen.length <= 8 && choice.series.every((one) => one.line)) Object.assign(layout.xaxis, marked(chosen));
    if (choice.line) layout.shapes = marks(choice);
    return [traces, layout];
  };
  const marks = (choice) => {
    const [at, low, high] = choice.line.at;
    const [along, over] = choice.across ? ["y", "x"] : ["x", "y"];
    const place = (from, to) => ({ [`${along}ref`]: "paper", [`${along}0`]: 0, [`${along}1`]: 1, [`${over}0`]: from, [`${over}1`]: to });
    const label = choice.across ? {} : { label: { text: escaped(choice.line.name), textposition: "end", yanchor: "bottom", font: { size: 12, color: color("quiet") } } };
    const made = [{ type: "line", ...place(at, at), line: { color: color("quiet"), width: 1.2, dash: "dash" }, layer: "below", ...label }];
    if (low !== null && high !== null) made.push({ type: "rect", ...place(low, high), fillcolor: color("quiet"), opacity: .12, line: { width: 0 }, layer: "below" });
    return made;
  };

  const heatPlot = (choice) => {
    const { x, y, z, log } = choice.heat;
    const scaled = log ? z.map((row) => row.map((value) => (value === null ? null : Math.log10(value)))) : z;
    const known = scaled.flat().filter((value) => value !== null);
    const bar = { thickness: 14, outlinewidth: 0, tickfont: { color: color("ink") } };
    if (log) {
      const [low, high] = [Math.min(...known), Math.max(...known)];
      const step = Math.max(1, Math.ceil((high - low) / 6));
      let ticks = [];
      for (let power = Math.ceil(low); power <= high; power += step) ticks.push(power);
      // less than two powers of ten have no marks of their own
      if (ticks.length < 2) ticks = [low, (low + high) / 2, high];
      Object.assign(bar, { tickvals: ticks, ticktext: ticks.map((power) => number(Number((10 ** power).toPrecision(4)))) });
    }
    const words = x.some((value) => typeof value === "string");
    const trace = {
      type: "heatmap", x: escaped(x), y: escaped(y), z: scaled, colorscale: "Cividis", xgap: 1, ygap: 1, colorbar: bar,
      hoverongaps: false,
      text: z.map((row, at) => row.map((value, place) => (value === null ? "" : `${escaped(y[at])}, ${escaped(choice.x)} ${escaped(String(x[place]))}<br>${number(value)}`))),
      hovertemplate: "%{text}<extra></extra>",
    };
    const layout = {
      // layers and heads are counted: no marks between them
      xaxis: { ...axis(choice.x, false, x, words ? 40 : 0), ...(words || x.length > 16 ? {} : marked(x)), showgrid: false, zeroline: false },
      yaxis: { ...axis(choice.y, false, y, 60), autorange: "reversed", showgrid: false },
      height: Math.max(260, 130 + 26 * y.length),
    };
    return [[trace], layout];
  };

  const table = (choice) => {
    const row = (cells, name = "td") => make("tr", {}, ...cells.map((cell, index) =>
      make(index === 0 ? "th" : name, index === 0 ? { scope: name === "th" ? "col" : "row" } : name === "th" ? { scope: "col" } : {}, cell)));
    const text = (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? number(value) : String(value));
    let [head, rows] = [[], []];
    if (choice.heat) {
      head = [choice.y, ...choice.heat.x.map((value) => `${choice.x} ${value}`)];
      rows = choice.heat.y.map((name, index) => [name, ...choice.heat.z[index].map(text)]);
    } else {
      head = ["series", choice.x, choice.y, "95 % interval", "", "record"];
      for (const series of choice.series.filter((one) => one.path.some(Boolean))) {
        series.x.forEach((x, index) => {
          const [low, high] = [series.low[index], series.high[index]];
          const link = make("a", { href: site.recordLink(series.path[index]) }, "record");
          rows.push([series.name, text(x), text(series.y[index]), low === null || high === null ? "–" : site.between(low, high), series.text[index], link]);
        });
      }
    }
    return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of the plot" },
      make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((cells) => row(cells)))));
  };

  const started = (figure) => {
    const { title, lists, choices } = JSON.parse(figure.querySelector("script").textContent);
    const canvas = figure.querySelector(".canvas");
    const numbers = make("details", {}, make("summary", {}, "The numbers as a table"));
    const missing = make("p", { class: "missing", hidden: true });
    const source = make("p", { class: "missing", hidden: true });
    canvas.after(source, missing, numbers);
    let chosen = choices[0].keys.slice();
    let choice = choices[0];
    let drawn = false;

    const draw = () => {
      const [traces, layout] = choice.heat ? heatPlot(choice) : seriesPlot(choice);
      const narrow = canvas.clientWidth < 500;
      Object.assign(layout, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: color("ink"), family: "system-ui, sans-serif", size: narrow ? 11 : 13 },
        margin: { l: 50, r: narrow ? 8 : 24, t: 36, b: 48 }, hoverlabel: { align: "left" }, dragmode: false,
      });
      Plotly.react(canvas, traces, layout, { responsive: true, displaylogo: false, displayModeBar: "hover", scrollZoom: false });
      if (!drawn) canvas.on("plotly_click", ({ points: [point] }) => { if (typeof point.customdata === "string") location.href = site.recordLink(point.customdata); });
      drawn = true;
    };
    const show = () => {
      canvas.setAttribute("role", "group");
      canvas.setAttribute("aria-label", `${title}: ${choice.keys.join("; ")}. The numbers stand in the table below.`);
      missing.hidden = !choice.missing.length;
      missing.textContent = `Not shown: ${choice.missing.join("; ")}.`;
      source.hidden = !choice.heat?.path;
      if (choice.heat?.path) source.replaceChildren(make("a", { href: site.recordLink(choice.heat.path) }, "The record of this map (JSON)"));
      if (numbers.open) fill();
      draw();
    };
    const fill = () => { numbers.lastChild.localName === "div" && numbers.lastChild.remove(); numbers.append(table(choice)); };
    numbers.addEventListener("toggle", () => { if (numbers.open) fill(); });

    // a list offers what fits the choices before it; later ones follow
    const box = figure.querySelector(".lists");
    const offer = () => {
      box.replaceChildren();
      let left = choices;
      lists.forEach((name, index) => {
        const values = [...new Set(left.map((one) => one.keys[index]))];
        if (!values.includes(chosen[index])) chosen[index] = values[0];
        left = left.filter((one) => one.keys[index] === chosen[index]);
        if (values.length === 1) return;
        const select = make("select", { "data-list": name }, ...values.map((value) => make("option", { value }, value)));
        select.value = chosen[index];
        select.addEventListener("change", () => {
          chosen[index] = select.value;
          offer();
          show();
          box.querySelector(`[data-list="${name}"]`)?.focus();
        });
        box.append(make("label", {}, `${name} `, select));
      });
      choice = left[0];
    };
    offer();
    new IntersectionObserver((entries, observer) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      show();
    }, { rootMargin: "300px" }).observe(canvas);
    const again = () => { if (drawn) draw(); };
    document.addEventListener("themechange", again);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    matchMedia("print").addEventListener("change", draw);
    addEventListener("beforeprint", draw);
    addEventListener("afterprint", again);
  };
  for (const figure of document.querySelectorAll("figure.plot")) started(figure);
})();
