"use strict";
// What an element with data-tip tells stands at the bottom while the pointer or the focus is on it.
const tip = document.getElementById("tip");
const show = event => { const at = event.target.closest("[data-tip]"); tip.textContent = at ? at.dataset.tip : ""; };
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, show);
document.addEventListener("keydown", event => { if (event.key === "Escape") tip.textContent = ""; });

// A line a series over x, in the colours of the theme: drawn again when the theme or the width changes.
const charts = new Map();
const draw = box => {
  const { x, series } = JSON.parse(box.dataset.chart);
  const { color, borderTopColor } = getComputedStyle(box);  // resolved, as a canvas needs them
  const axis = { stroke: color, grid: { stroke: borderTopColor, width: 1 }, ticks: { stroke: borderTopColor, width: 1 } };
  const lines = series.map(one => one.point
    ? { label: one.name, stroke: one.colour, width: 0, points: { show: true, size: 11, fill: one.colour } }
    : { label: one.name, stroke: one.colour, width: 2, dash: one.dash ? [6, 4] : undefined, points: { show: !one.dash && x.values.length < 50 } });
  charts.get(box)?.destroy();
  charts.set(box, new uPlot({
    width: box.clientWidth, height: 240,
    scales: { x: { time: false }, y: { range: (plot, low, high) => [0, high * 1.1 || 1] } },
    axes: [{ ...axis, label: x.name }, { ...axis, label: "s", size: 60 }],
    series: [{ label: x.name }, ...lines],
  }, [x.values, ...series.map(one => one.values)], box));
};
const drawAll = () => document.querySelectorAll("[data-chart]").forEach(draw);
addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  drawAll();
});
drawAll();
