// Draws the curves of data.js. All text comes from there or from the page and is escaped.
"use strict";
(function () {
  const data = window.STEPTUNED;
  if (!data || !window.Plotly) { document.body.classList.add("no-script"); return; }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (line) => (line.colour === "#000000" ? css("--text") : line.colour);
  const dashes = { "-": "solid", "--": "dash", "-.": "dashdot", ":": "dot" };
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const faded = (colour, alpha) => {
    const hex = colour.replace("#", "");
    return `rgba(${[0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;
  };

  const inUnits = (panel, x, key) => (
    key === "epochs" ? x.bp.map((v) => (v === null ? null : v / panel.per_epoch)) : x[key]
  );
  const axisName = (row) => (row ? `y${row + 1}` : "y");
  const linesOf = (panel, choice) => panel.lines.filter((_, index) => choice.methods.has(index));
  const rowsOf = (panel, choice) => {
    const rows = panel.rows.filter((row) => !choice.measures || choice.measures.has(row.key));
    return rows.length ? rows : panel.rows.slice(0, 1);
  };
  // The key of a measure in the data of the seeds: its median where there are quartiles.
  const keyOf = (line, key) => (
    line.bands[key] && line.bands[key].quartiles ? `${key} median` : key
  );
  // The indices of the seeds of a line that have a measure.
  const seedsOf = (line, key) => line.y.flatMap((y, i) => (keyOf(line, key) in y ? [i] : []));
  const present = (values) => values.flatMap((v, i) => (v === null ? [] : [i]));

  function tracesOf(panel, choice) {
    const traces = [];
    rowsOf(panel, choice).forEach((measure, row) => {
      for (const line of linesOf(panel, choice)) {
        traces.push(...tracesOfLine(panel, line, measure, axisName(row), choice));
      }
    });
    return traces;
  }

  // The curves of a method on one axis: all seeds, or their median and band, which are in the data.
  function tracesOfLine(panel, line, measure, yaxis, choice) {
    const key = keyOf(line, measure.key), seeds = seedsOf(line, measure.key);
    const band = line.bands[measure.key];
    const color = colourOf(line), dash = dashes[line.dash] || "solid", name = escaped(line.label);
    const base = { type: "scatter", mode: "lines", xaxis: "x", yaxis, showlegend: false, name };
    const label = `${name}<br>${escaped(measure.label)} %{y:${measure.format}}`;
    const hover = (text) => `${label} (${text})<extra></extra>`;
    const seedTrace = (i, more) => ({
      ...base, x: inUnits(panel, line.x[i], choice.x), y: line.y[i][key],
      hovertemplate: hover(`seed ${line.seeds[i]}`), ...more,
    });
    if (choice.draw === "seeds" || !band) {
      return seeds.map((i) => seedTrace(i, { line: { color, dash, width: 1.5 } }));
    }
    const drawn = present(band.middle), pick = (values) => drawn.map((i) => values[i]);
    const x = pick(inUnits(panel, line.mean_x, choice.x));
    const fillcolor = faded(color, 0.14);
    // The band ends with the shortest seed.
    const longer = seeds.filter((i) => present(line.y[i][key]).length > drawn.length);
    return [...longer.map((i) => seedTrace(i, { line: { color, dash, width: 0.8 }, opacity: 0.6 })),
      { ...base, x, y: pick(band.low), line: { width: 0, color }, hoverinfo: "skip" },
      { ...base, x, y: pick(band.high), line: { width: 0, color }, fill: "tonexty", fillcolor,
        hoverinfo: "skip" },
      { ...base, x, y: pick(band.middle), line: { color, dash, width: 2 },
        hovertemplate: hover(`median of ${seeds.length}`) }];
  }

  // The bounds of gamma: each value once, in the colour of its method if it has only one.
  function boundsOf(panel, choice, key) {
    if (key !== "gamma" && key !== "raw gamma") return [];
    const lines = linesOf(panel, choice).filter((line) => line.bounds && seedsOf(line, key).length);
    return [0, 1].flatMap((i) => [...new Set(lines.map((line) => line.bounds[i]))].map((value) => {
      const own = lines.filter((line) => line.bounds[i] === value);
      const colour = own.length === 1 && lines.length > 1 ? colourOf(own[0]) : css("--soft");
      return { value, text: `${"mM"[i]} = ${value}`, anchor: i ? "bottom" : "top", colour };
    }));
  }

  // Quartiles may have extreme outliers: the axis shows the bounds and the range without outliers.
  function rangeOf(panel, choice, row, logarithmic) {
    if (row.axis === "share") return [-0.03, 1.03];
    const bands = linesOf(panel, choice)
      .map((line) => line.bands[row.key])
      .filter((band) => band && band.quartiles);
    const bounds = boundsOf(panel, choice, row.key).map((bound) => bound.value);
    const ends = [...bounds, ...bands.flatMap((band) => band.extent || [])];
    if (!bands.length || !ends.length) return undefined;
    const low = Math.min(...ends), high = Math.max(...ends);
    if (logarithmic) {
      const margin = Math.max(0.06, 0.06 * Math.log10(high / low));
      return [Math.log10(low) - margin, Math.log10(high) + margin];
    }
    return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  }

  // Plain numbers on the axis of gamma: 1, 2 and 5, or only powers of ten above two decades.
  function ticksOf(range) {
    const digits = range[1] - range[0] < 2 ? [1, 2, 5] : [1], tickvals = [];
    for (let power = -12; power <= 12; power++) {
      digits.forEach((digit) => tickvals.push(Number(`${digit}e${power}`)));
    }
    return { tickvals, ticktext: tickvals.map(String) };
  }

  // A title of several words takes two lines.
  function wrapped(title) {
    const words = title.split(" ");
    if (title.length < 16) return escaped(title);
    const length = (count) => words.slice(0, count).join(" ").length;
    const half = words.findIndex((_, i) => length(i + 1) >= title.length / 2);
    const lines = [words.slice(0, half + 1), words.slice(half + 1)];
    return lines.map((part) => escaped(part.join(" "))).join("<br>");
  }

  const heightOf = (rows) => data.height.page + data.height.row * rows.length;

  function layoutOf(panel, choice) {
    const rows = rowsOf(panel, choice);
    const weights = rows.map((_, i) => (i === 0 ? 2.2 : 1)), gap = 0.03;
    const total = weights.reduce((a, b) => a + b, 0);
    const grid = {
      gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true,
    };
    const title = panel.axes.find(([key]) => key === choice.x)[1];
    const layout = {
      margin: { l: 60, r: 10, t: 10, b: 45 }, height: heightOf(rows), hovermode: "closest",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--text"), family: "system-ui, sans-serif", size: 12 },
      uirevision: choice.x + choice.y + rows.map((row) => row.key), shapes: [], annotations: [],
      xaxis: {
        ...grid, title: { text: escaped(title) }, anchor: axisName(rows.length - 1),
        type: panel.axes[0][0] === "k" ? choice.y : "linear",
      },
    };
    let top = 1;
    rows.forEach((row, i) => {
      const height = weights[i] / total, axis = axisName(i);
      const logarithmic = choice.y === "log" && row.axis === "log";
      const range = rangeOf(panel, choice, row, logarithmic);
      layout[`yaxis${i ? i + 1 : ""}`] = {
        ...grid, title: { text: wrapped(row.label), font: { size: 11 } },
        domain: [Math.max(0, top - height + gap), top],
        type: logarithmic ? "log" : "linear", exponentformat: "power", nticks: i ? 5 : 0,
        ...(range ? { range } : {}), ...(range && logarithmic ? ticksOf(range) : {}),
      };
      for (const bound of boundsOf(panel, choice, row.key)) {
        layout.margin.r = 60;
        layout.shapes.push({
          type: "line", name: bound.text, xref: "paper", x0: 0, x1: 1,
          yref: axis, y0: bound.value, y1: bound.value,
          line: { color: bound.colour, dash: "dot", width: 1 },
        });
        layout.annotations.push({
          text: bound.text, xref: "paper", x: 1, xanchor: "left",
          yref: axis, y: logarithmic ? Math.log10(bound.value) : bound.value,
          yanchor: bound.anchor, showarrow: false, font: { size: 10, color: bound.colour },
        });
      }
      top -= height;
    });
    return layout;
  }

  const panels = [];
  for (const article of document.querySelectorAll("article[data-panel]")) {
    const panel = data.panels[Number(article.dataset.panel)];
    const form = article.querySelector("form"), target = article.querySelector(".plot");
    if (!form || !target) continue;
    const methodBoxes = [...form.querySelectorAll("[name=method]")];
    const measureBoxes = [...form.querySelectorAll("[name=measure]")];
    const kept = `steptuned ${location.pathname} ${panel.id}`;
    try {
      const state = JSON.parse(sessionStorage.getItem(kept) || "null");
      if (state) {
        form.x.value = state.x; form.y.value = state.y; form.draw.value = state.draw;
        methodBoxes.forEach((box, i) => { box.checked = state.methods.includes(i); });
        if (state.measures) {
          measureBoxes.forEach((box) => { box.checked = state.measures.includes(box.value); });
        }
      }
    } catch (error) { /* a page opened from a file may have no storage: the controls are reset */ }
    const draw = () => {
      const methods = methodBoxes.flatMap((box, i) => (box.checked ? [i] : []));
      const checked = measureBoxes.filter((box) => box.checked).map((box) => box.value);
      const measures = measureBoxes.length ? checked : null;
      const choice = {
        x: form.x.value, y: form.y.value, draw: form.draw.value,
        methods: new Set(methods), measures: measures && new Set(measures),
      };
      try {
        sessionStorage.setItem(kept, JSON.stringify({ ...choice, methods, measures }));
      } catch (error) { /* as above */ }
      target.style.height = `${heightOf(rowsOf(panel, choice))}px`;
      return window.Plotly.react(target, tracesOf(panel, choice), layoutOf(panel, choice), {
        responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"],
      });
    };
    form.addEventListener("change", draw);
    form.addEventListener("submit", (event) => event.preventDefault());
    panels.push({ target, draw, drawn: false });
  }
  // A plot is drawn when it comes near the screen, so that a page with many plots opens quickly.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = panels.find((p) => p.target === entry.target);
      if (entry.isIntersecting && panel && !panel.drawn) { panel.drawn = true; panel.draw(); }
    }
  }, { rootMargin: "400px" });
  panels.forEach((panel) => watcher.observe(panel.target));
  dark.addEventListener("change", () => panels.filter((p) => p.drawn).forEach((p) => p.draw()));
})();
