"use strict";
// The tip of the element under the pointer or the focus is shown at the bottom.
const tip = document.getElementById("tip");
const show = event => { const at = event.target.closest("[data-tip]"); tip.textContent = at ? at.dataset.tip : ""; };
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, show);
document.addEventListener("keydown", event => { if (event.key === "Escape") tip.textContent = ""; });

// A line a series over x, in the colours of the theme: drawn again when the theme or the width changes.
const charts = new Map();
const draw = box => {
  const { x, series, zero } = JSON.parse(box.dataset.chart);
  const { color, borderTopColor } = getComputedStyle(box);  // resolved, as a canvas needs them
  const axis = { stroke: color, grid: { stroke: borderTopColor, width: 1 }, ticks: { stroke: borderTopColor, width: 1 } };
  const lines = series.map(one => one.point
    ? { label: one.name, stroke: one.colour, width: 0, points: { show: true, size: 11, fill: one.colour } }
    : { label: one.name, stroke: one.colour, width: 2, dash: one.dash ? [6, 4] : undefined, points: { show: !one.dash && x.values.length < 50 } });
  const range = (plot, low, high) => zero ? [0, high * 1.1 || 1] : [low - 0.1 * (high - low || low), high + 0.1 * (high - low || high)];
  charts.get(box)?.destroy();
  charts.set(box, new uPlot({
    width: box.clientWidth, height: 240,
    scales: { x: { time: false }, y: { range } },
    axes: [{ ...axis, label: x.name }, { ...axis, label: "s", size: 60 }],
    legend: { live: false },
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

// The time line of the pipeline: buttons zoom about its middle, a drag moves it, the axis follows.
const WIDTH = 1000;
const look = (svg, start, width) => {
  const shown = Math.min(WIDTH, Math.max(WIDTH / 500, width)), from = Math.min(WIDTH - shown, Math.max(0, start));
  svg.setAttribute("viewBox", `${from} 0 ${shown} ${svg.viewBox.baseVal.height}`);
  const { ms, fold, gap, skipped } = svg.dataset;
  [...svg.parentElement.querySelectorAll(".axis span")].forEach((label, quarter) => {
    const drawn = (from + shown * quarter / 4) * ms / WIDTH;
    const at = +skipped && drawn > +fold + +gap / 2 ? drawn + +skipped : drawn;
    label.textContent = Number(at.toPrecision(4)) + (quarter === 4 ? " ms" : "");
  });
};
const zoomed = (svg, factor) => {
  const { x, width } = svg.viewBox.baseVal;
  if (factor) look(svg, x + width / 2 - width / factor / 2, width / factor); else look(svg, 0, WIDTH);
};
const timelines = () => document.querySelectorAll(".lanes svg").forEach(svg => zoomed(svg, 0));
document.addEventListener("click", event => {
  const button = event.target.closest("[data-zoom]");
  if (button) zoomed(document.querySelector(".lanes svg"), +button.dataset.zoom);
});
let drag = null;
document.addEventListener("pointerdown", event => {
  const svg = event.target.closest(".lanes svg");
  if (svg) drag = { svg, at: event.clientX, from: svg.viewBox.baseVal.x };
});
document.addEventListener("pointermove", event => {
  if (drag) look(drag.svg, drag.from - (event.clientX - drag.at) * drag.svg.viewBox.baseVal.width / drag.svg.clientWidth, drag.svg.viewBox.baseVal.width);
});
document.addEventListener("pointerup", () => { drag = null; });
timelines();
