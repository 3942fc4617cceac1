"use strict";
// Shows the values under the pointer, from the corners of the drawn lines.
const tip = document.getElementById("tip");
const names = [...document.querySelectorAll(".legend li")].map((li) => li.textContent);
const value = (axis, place) => {
  const [low, high, from, to, log] = axis.split(" ").map(Number);
  const at = low + (high - low) * (place - from) / (to - from);
  return Number((log ? 10 ** at : at).toPrecision(5));
};
for (const chart of document.querySelectorAll(".chart")) {
  chart.addEventListener("pointerleave", () => { tip.hidden = true; });
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    const texts = [];
    for (const line of chart.querySelectorAll(".line")) {
      const corners = line.getAttribute("points").split(" ").map((at) => at.split(",").map(Number));
      const near = corners.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      const name = names[Number(line.classList[1].slice(1))];
      texts.push(`${value(chart.dataset.x, near[0])}: ${value(chart.dataset.y, near[1])}`
        + (name ? `  ${name}` : ""));
    }
    if (texts.length === 0) return;
    tip.textContent = texts.join("\n");
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
}
