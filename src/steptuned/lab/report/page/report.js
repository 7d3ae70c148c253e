// Draws the curves of data.js. All words come from there or from the page and are only ever set as text.
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

  function xs(panel, line, seed, key) {
    const x = line.x[seed];
    return key === "epochs" ? x.bp.map((v) => (v === null ? null : v / panel.per_epoch)) : x[key];
  }
  const column = (arrays, i) => arrays.map((a) => a[i]).filter((v) => v !== null && v !== undefined);
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  function tracesOf(panel, choice) {
    const traces = [];
    panel.rows.forEach(([key, title], row) => {
      const axis = row ? `y${row + 1}` : "y";
      panel.lines.forEach((line, index) => {
        const seeds = line.y.map((_, i) => i).filter((i) => key in line.y[i]);
        if (!choice.methods.has(index) || !seeds.length) return;
        const colour = colourOf(line), dash = dashes[line.dash] || "solid";
        const base = { type: "scatter", mode: "lines", xaxis: "x", yaxis: axis, showlegend: false, name: escaped(line.label) };
        const hover = `${escaped(line.label)}<br>${escaped(title)} %{y:.5g}`;
        if (choice.draw === "seeds" || seeds.length === 1) {
          for (const i of seeds) {
            traces.push({ ...base, x: xs(panel, line, i, choice.x), y: line.y[i][key], line: { color: colour, dash, width: 1.5 },
              hovertemplate: `${hover} (seed ${line.seeds[i]})<extra></extra>` });
          }
          return;
        }
        const allX = seeds.map((i) => xs(panel, line, i, choice.x)), allY = seeds.map((i) => line.y[i][key]);
        const length = allX[0].length, x = [], low = [], high = [], middle = [];
        for (let i = 0; i < length; i++) {
          const values = column(allY, i), at = mean(column(allX, i));
          if (values.length < seeds.length || at === null) continue;  // the mean ends with the shortest seed
          x.push(at); low.push(Math.min(...values)); high.push(Math.max(...values)); middle.push(mean(values));
        }
        allY.forEach((y, i) => {
          if (y.filter((v) => v !== null).length <= middle.length) return;
          traces.push({ ...base, x: allX[i], y, line: { color: colour, dash, width: 0.8 }, opacity: 0.6, hovertemplate: `${hover} (seed ${line.seeds[seeds[i]]})<extra></extra>` });
        });
        traces.push({ ...base, x, y: low, line: { width: 0, color: colour }, hoverinfo: "skip" });
        traces.push({ ...base, x, y: high, line: { width: 0, color: colour }, fill: "tonexty", fillcolor: faded(colour, 0.18), hoverinfo: "skip" });
        traces.push({ ...base, x, y: middle, line: { color: colour, dash, width: 2 }, hovertemplate: `${hover} (mean of ${seeds.length})<extra></extra>` });
      });
    });
    return traces;
  }

  function layoutOf(panel, choice) {
    const weights = panel.rows.map((_, i) => (i === 0 ? 2.2 : 1)), total = weights.reduce((a, b) => a + b, 0), gap = 0.03;
    const grid = { gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true };
    const title = panel.axes.find(([key]) => key === choice.x)[1];
    const layout = { margin: { l: 60, r: 10, t: 10, b: 45 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { color: css("--text"), family: "system-ui, sans-serif", size: 12 }, uirevision: choice.x + choice.y,
      xaxis: { ...grid, title: { text: escaped(title) }, anchor: panel.rows.length > 1 ? `y${panel.rows.length}` : "y", type: panel.axes[0][0] === "k" ? choice.y : "linear" } };
    let top = 1;
    panel.rows.forEach(([, name, logarithmic], row) => {
      const height = weights[row] / total;
      layout[row ? `yaxis${row + 1}` : "yaxis"] = { ...grid, title: { text: escaped(name), font: { size: 11 } }, domain: [Math.max(0, top - height + gap), top],
        type: choice.y === "log" && logarithmic ? "log" : "linear", exponentformat: "power" };
      top -= height;
    });
    return layout;
  }

  const panels = [];
  for (const article of document.querySelectorAll("article[data-panel]")) {
    const panel = data.panels[Number(article.dataset.panel)], form = article.querySelector("form"), target = article.querySelector(".plot");
    if (!form || !target) continue;
    const kept = `steptuned ${location.pathname} ${panel.id}`;
    try {
      const state = JSON.parse(sessionStorage.getItem(kept) || "null");
      if (state) {
        form.x.value = state.x; form.y.value = state.y; form.draw.value = state.draw;
        form.querySelectorAll("[name=method]").forEach((box, i) => { box.checked = state.methods.includes(i); });
      }
    } catch (error) { /* a page from a file may have no storage: the switches then begin anew */ }
    const draw = () => {
      const methods = [...form.querySelectorAll("[name=method]")].flatMap((box, i) => (box.checked ? [i] : []));
      const choice = { x: form.x.value, y: form.y.value, draw: form.draw.value, methods: new Set(methods) };
      try { sessionStorage.setItem(kept, JSON.stringify({ ...choice, methods })); } catch (error) { /* as above */ }
      return window.Plotly.react(target, tracesOf(panel, choice), layoutOf(panel, choice), { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
    };
    form.addEventListener("change", draw);
    form.addEventListener("submit", (event) => event.preventDefault());
    panels.push({ target, draw, drawn: false });
  }
  // A plot is drawn when it comes near the screen, so that a page with many opens at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = panels.find((p) => p.target === entry.target);
      if (entry.isIntersecting && panel && !panel.drawn) { panel.drawn = true; panel.draw(); }
    }
  }, { rootMargin: "400px" });
  panels.forEach((panel) => watcher.observe(panel.target));
  dark.addEventListener("change", () => panels.filter((p) => p.drawn).forEach((p) => p.draw()));
})();
