"use strict";
// Shows the values below the pointer, from what each chart has in data-hover.

const tip = document.getElementById("tip");

function number(value) {
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function show(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const left = event.clientX + 14, top = event.clientY + 14;
  tip.style.left = Math.max(4, left + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 10 : left) + "px";
  tip.style.top = (top + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : top) + "px";
}

function hide(svg) {
  tip.style.display = "none";
  svg.classList.remove("hovered");
}

// Where the pointer is, in the units of the chart.
function across(svg, event) {
  const box = svg.getBoundingClientRect();
  return ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
}

function steps(first, last) {
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] + points[middle][1] < step) low = middle + 1; else high = middle;
  }
  const gap = index => Math.abs(points[index][0] + points[index][1] / 2 - step);
  return low > 0 && gap(low - 1) < gap(low) ? low - 1 : low;
}

function place(range, value, log) {
  const [low, high, start, end] = range;
  const scale = log ? Math.log10 : v => v;
  const share = log && value <= 0 ? 0 : (scale(value) - scale(low)) / (scale(high) - scale(low));
  return start + Math.min(Math.max(share, 0), 1) * (end - start);
}

function lines(svg, chart) {
  const cursor = svg.querySelector(".cursor"), dots = svg.querySelectorAll(".dot");
  return event => {
    const [low, high, start, end] = chart.x;
    const step = low + ((across(svg, event) - start) / (end - start)) * (high - low);
    const text = [];
    chart.series.forEach((series, index) => {
      const [first, more, mean, least, most] = series.points[nearest(series.points, step)];
      const x = place(chart.x, first + more / 2);
      if (!index) {
        text.push(steps(first, first + more));
        cursor.setAttribute("x1", x);
        cursor.setAttribute("x2", x);
      }
      const range = least === undefined ? "" : ` (${number(least)} to ${number(most)})`;
      text.push(`${series.name}: ${number(mean)}${range}`);
      const drawn = typeof mean === "number";
      dots[index].setAttribute("cx", drawn ? x : -9);
      dots[index].setAttribute("cy", drawn ? place(chart.y, mean, chart.log) : -9);
    });
    show(event, text.join("\n"));
  };
}

function bars(svg, chart) {
  const cursor = svg.querySelector(".cursor-bar"), [left, slot] = chart.bars;
  return event => {
    const index = Math.min(Math.max(Math.floor((across(svg, event) - left) / slot), 0), chart.values.length - 1);
    cursor.setAttribute("x", left + index * slot);
    const values = chart.values[index];
    const rows = chart.names.map((name, phase) => `${name}: ${number(values[phase])} s`).reverse();
    const total = values.reduce((sum, value) => sum + value, 0);
    show(event, [steps(...chart.steps[index]), ...rows, `together: ${number(total)} s`].join("\n"));
  };
}

for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const chart = JSON.parse(svg.dataset.hover);
  const move = chart.bars ? bars(svg, chart) : lines(svg, chart);
  svg.addEventListener("pointermove", event => { svg.classList.add("hovered"); move(event); });
  svg.addEventListener("pointerleave", () => hide(svg));
}
