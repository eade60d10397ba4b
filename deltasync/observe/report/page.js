"use strict";
const shown = JSON.parse(document.getElementById("shown").textContent);
const tip = document.getElementById("tip");
for (const svg of document.querySelectorAll("svg[data-key]")) {
  const { key, left, top, step, rows } = svg.dataset;
  const cursor = svg.querySelector(".cursor");
  const bins = shown[key] || [];
  const hide = () => { tip.style.display = "none"; cursor.style.visibility = "hidden"; };
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const bin = Math.floor(((event.clientX - box.left) * scale - left) / step);
    if (bin < 0 || bin >= bins.length) { hide(); return; }
    let lines = bins[bin];
    if (+rows) {
      const row = Math.floor(((event.clientY - box.top) * scale - top) / 14);
      const names = shown.names;
      if (row < 0 || row >= +rows) { hide(); return; }
      lines = [lines[0], names[row], lines[row + 1] || "no delta"];
    }
    tip.textContent = lines.join("\n");
    tip.style.display = "block";
    const width = tip.offsetWidth, height = tip.offsetHeight;
    const x = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
    const y = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
    cursor.setAttribute("transform", `translate(${+left + (bin + 0.5) * step} 0)`);
    cursor.style.visibility = "visible";
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
